"""Public names of Keras and TensorFlow that use a model's weights, which each rank has of its own."""

from __future__ import annotations

SAVES = "keeps weights: inside shared_parameters those that all ranks share; outside it is an error, or not caught"
LOADS = "writes weights: inside shared_parameters they are shared from then on"
SHOWS = "computes with what the variables hold: in fit, with the callback, what all ranks share"
TRAINS = "takes steps with this rank's own"
OWN = "is of what the variables hold, inside shared_parameters and outside, as docs/guides/step_ahead.md says"
NOTHING = "does not read weights"

PLACES: dict[str, tuple[str, ...]] = {
    SAVES: (
        "export.ExportArchive", "models.save_model", "saved_model.save", "saving.save_model", "saving.save_weights",
        "train.Checkpoint", "train.CheckpointManager",
        "Model.export", "Model.get_state_tree", "Model.get_weights", "Model.save", "Model.save_weights"),
    LOADS: (
        "saving.load_weights", "Model.compile", "Model.load_weights", "Model.quantize", "Model.set_state_tree",
        "Model.set_weights"),
    SHOWS: (
        "Model.evaluate", "Model.evaluate_generator", "Model.predict", "Model.predict_generator",
        "Model.predict_on_batch", "Model.test_on_batch"),
    TRAINS: ("Model.fit", "Model.fit_generator", "Model.train_on_batch"),
    OWN: (
        "Model.call", "Model.load_own_variables", "Model.save_own_variables", "Model.make_predict_function",
        "Model.make_test_function", "Model.make_train_function", "Model.predict_step", "Model.test_step",
        "Model.train_step", "Model.quantized_call", "Model.rematerialized_call", "Model.stateless_call",
        "Model.stateless_compute_loss", "Model.symbolic_call", "Model.trainable_variables", "Model.trainable_weights",
        "Model.variables", "Model.weights", "Model.get_weight_paths", "Model.losses", "Model.layers",
        "Model.get_layer", "Model.submodules"),
    NOTHING: (
        "models.Model", "models.Sequential", "models.clone_model", "models.experimental", "models.load_model",
        "models.model_from_config", "models.model_from_json", "models.model_from_yaml", "saved_model.Asset",
        "saved_model.LoadOptions", "saved_model.SaveOptions", "saved_model.contains_saved_model", "saved_model.load",
        "saving.CustomObjectScope", "saving.KerasFileEditor", "saving.custom_object_scope",
        "saving.deserialize_keras_object", "saving.get_custom_objects", "saving.get_registered_name",
        "saving.get_registered_object", "saving.load_model", "saving.register_keras_serializable",
        "saving.serialize_keras_object", "train.CheckpointOptions", "train.CheckpointView",
        "train.checkpoints_iterator", "train.get_checkpoint_state", "train.latest_checkpoint",
        "train.load_checkpoint",
        "Model.activity_regularizer", "Model.add_loss", "Model.add_metric", "Model.add_update", "Model.add_variable",
        "Model.add_weight", "Model.autotune_steps_per_execution", "Model.build", "Model.build_from_config",
        "Model.compile_from_config", "Model.compiled_loss", "Model.compiled_metrics", "Model.compute_dtype",
        "Model.compute_loss", "Model.compute_mask", "Model.compute_metrics", "Model.compute_output_shape",
        "Model.compute_output_signature", "Model.compute_output_spec", "Model.count_params",
        "Model.distribute_reduction_method", "Model.distribute_strategy", "Model.dtype", "Model.dtype_policy",
        "Model.dynamic", "Model.finalize_state", "Model.from_config", "Model.get_build_config",
        "Model.get_compile_config", "Model.get_config", "Model.get_input_at", "Model.get_input_mask_at",
        "Model.get_input_shape_at", "Model.get_metrics_result", "Model.get_output_at", "Model.get_output_mask_at",
        "Model.get_output_shape_at", "Model.get_quantization_layer_structure", "Model.inbound_nodes", "Model.input",
        "Model.input_dtype", "Model.input_mask", "Model.input_shape", "Model.input_spec", "Model.jit_compile",
        "Model.loss", "Model.metrics", "Model.metrics_names", "Model.metrics_variables", "Model.name",
        "Model.name_scope", "Model.non_trainable_variables", "Model.non_trainable_weights", "Model.outbound_nodes",
        "Model.output", "Model.output_mask", "Model.output_shape", "Model.path", "Model.quantization_mode",
        "Model.quantized_build", "Model.reset_metrics", "Model.reset_states", "Model.run_eagerly", "Model.save_spec",
        "Model.state_updates", "Model.stateful", "Model.steps_per_execution", "Model.summary",
        "Model.supports_masking", "Model.to_json", "Model.to_yaml", "Model.trainable", "Model.updates",
        "Model.variable_dtype", "Model.with_name_scope")}
