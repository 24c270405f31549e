"""Every scenario under real horovodrun, with both Keras: MPI and Gloo, on 1, 2 and 4 ranks; one launch a job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.jobs import Job, cases
from tests.scenarios import names

KINDS = {
    Job("tensorflow", "mpi", 2, quick=True): ("function",),
    Job("tensorflow", "mpi", 2): ("function", "keras"),
    Job("tensorflow", "gloo", 2): ("keras",),
    Job("tensorflow", "mpi", 1): ("tape", "function", "keras"),
    Job("tensorflow", "mpi", 2, keras="tf_keras"): ("keras",),
    Job("tensorflow", "mpi", 4): ("keras",),
}
"""Kinds of training by job: all of them everywhere would take too long. On one rank, all have what is its own."""
CALLBACKS = tuple(f"keras_callbacks.{name}" for name in (
    "the_warm_up_sets", "the_best_model", "the_density_warms", "local_variables_are_not", "elastic_"))
"""Scenarios of callbacks whose ranks tell each other something, or that count them."""
ALONE = (*CALLBACKS, "keras_fit.fit_reduces", "partial.eager_steps", "step_ahead_models.fit_shows",
         "step_ahead_saving.")
"""Scenarios of TensorFlow alone that run on one rank."""
QUICK_FUNCTIONS = ("features.", "sparse.", "transport.")
"""Scenarios of tf.function that `make test` has, on two ranks over MPI."""
QUICK = ("gradients.", "keras_fit.fit_reduces", "keras_callbacks.the_warm_up_sets", "mixed_precision.",
         "own_optimizers.a_gan_starts_alike", "refused.copies_of_models", "state.keras_state_restores",
         "step_ahead.the_learning_rate", "step_ahead_models.fit_shows")
"""Scenarios of TensorFlow alone that it has, by their beginnings."""
OVER_GLOO = (*CALLBACKS, "keras_edges.a_rank_without", "sparse.", "transport.", "features.process_set",
             "step_ahead.dense", "step_ahead.one_rank_alone", "step_ahead.two_", "step_ahead.the_ranks_of_a_host",
             "step_ahead_models.fit_shows")
ON_FOUR = (*CALLBACKS, "features.process_set", "features.a_rank_outside", "hosts.gives", "hosts.the_average",
           "sparse.gives", "sparse.equals", "partial.nothing", "step_ahead.dense", "step_ahead.the_ranks_of_a_host")
"""Scenarios that depend on the network or the number of ranks; PyTorch and the core have more on these."""
UNDER_TF_KERAS = ("keras_callbacks.", "keras_edges.", "keras_fit.", "mixed_precision.", "own_optimizers.", "refused.",
                  "step_ahead_models.", "step_ahead_next.", "step_ahead_saving.", "sparse.gives", "sparse.every_",
                  "state.a_resumed", "state.a_saved_model_resumes", "state.checkpoint_callbacks", "features.",
                  "step_ahead.dense", "step_ahead.several_", "step_ahead.two_", "partial.nothing",
                  "partial.a_round_has")
"""Scenarios that go another way in the other Keras."""


def belongs(job: Job, name: str) -> bool:
    """Return True if a job has a scenario. Partial rounds need MPI. Scenarios of TensorFlow alone have little to do
    with the network: they run over MPI, on two ranks, and in part on one."""
    if name.startswith("partial.") and job.backend != "mpi":
        return False
    if job.size == 4:
        return name.startswith(ON_FOUR)
    if job.backend == "gloo":
        return name.startswith(OVER_GLOO)
    if job.keras == "tf_keras":
        return name.startswith(UNDER_TF_KERAS)
    if name.endswith("]"):
        if job.size == 1:
            return name.endswith("[tape]") or name.startswith("one_rank.")
        if name.endswith("[function]"):
            return job.quick == name.startswith(QUICK_FUNCTIONS)
        return name.startswith(("partial.", "step_ahead."))
    if job.size == 2:
        return job.quick == name.startswith(QUICK)
    return job.size > 1 or name.startswith(ALONE)


JOBS = {job: [name for name in names("tensorflow", kinds) if belongs(job, name)] for job, kinds in KINDS.items()}


@pytest.mark.timeout(1560)  # the first of a job waits for all of them
@cases(JOBS)
def test_scenario(job: Job, scenario: str, run_scenario: Callable[[Job, str], None]) -> None:
    run_scenario(job, scenario)
