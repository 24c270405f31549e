"""TensorFlow alone: see tests.scenarios."""
