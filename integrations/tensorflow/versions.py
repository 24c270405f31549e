"""The Keras that TensorFlow uses."""

import tensorflow as tf

KERAS_3 = hasattr(tf.keras, "ops")
"""Otherwise it is tf-keras (TF_USE_LEGACY_KERAS=1)."""
KERAS = f"Keras {tf.keras.__version__}" if KERAS_3 else "tf-keras"
