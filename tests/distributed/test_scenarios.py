"""PyTorch's scenarios under real torchrun, without Horovod; one launch for each job."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.jobs import Job, cases
from tests.scenarios import WHERE_RANKS_MATTER, names

LEFT_OUT = {
    "partial.": "Partial is refused: rounds need MPI (scenarios of tests/distributed say so)",
    "one_rank.gives_the_plain_optimizers_bits_with_partial": "the same",
    "features.lbfgs_is_refused": "it refuses Partial with LBFGS",
    "lifetime.partial": "Partial",
    "refusals.adasum": "operations are PyTorch's",
    "refusals.join": "torch.distributed has Join, a context of DistributedDataParallel",
    "refusals.a_factory_that_was_imported_before": "nothing is patched that an import could come before",
    "features.synchronize_and_clip": "the measure is stock Horovod's optimizer",
    "features.sparse_gradients": "the same",
    "refusals.a_lone_allreduce": "there is no hvd.allreduce",
    "sparse.dense_is_horovods": "Dense is refused: DistributedDataParallel is there",
    "step_ahead_targets.dense_has_neither": "the same",
    "transport.horovods_collectives": "Horovod's",
    "hosts.process_sets": "no process sets are needed",
    "step_ahead_hosts.hosts_of_one_rank_need_no_process_sets": "the same",
    "step_ahead_targets.an_optimizer_that_is_distributed_already": "stock Horovod's optimizer is meant",
    "step_ahead_targets.the_next_optimizer_begins": "the same",
    "refusals.a_report_of_another_optimizer": "the same",
    "own_class.stock_horovods_checks": "stock Horovod's checks",
    "state.elastic": "elastic jobs are Horovod's; torchrun starts programs anew",
    "step_ahead_state.an_elastic": "the same",
    "overlapping_sets.": "sets are made on all ranks, by dist.new_group, at the start",
}
"""Scenarios that make no sense here, by the beginnings of their names, and why."""
ALL = [name for name in names("distributed") if not name.startswith(tuple(LEFT_OUT))]
QUICK = [name for name in ALL if name in {*names("distributed")} - {*names("torch")} or name.startswith("sparse.")]
"""Scenarios that PyTorch has under torchrun alone, and the sums."""

JOBS = {
    Job("distributed", "torchrun", 2, quick=True): QUICK,
    Job("distributed", "torchrun", 2): [name for name in ALL if name not in QUICK],
    Job("distributed", "torchrun", 1): [name for name in ALL if name.startswith((*WHERE_RANKS_MATTER, "hooks."))],
    Job("distributed", "torchrun", 4): [name for name in ALL if name.startswith(WHERE_RANKS_MATTER)],
}


@pytest.mark.timeout(1560)  # the first of a job waits for all of them
@cases(JOBS)
def test_scenario(job: Job, scenario: str, run_scenario: Callable[[Job, str], None]) -> None:
    run_scenario(job, scenario)


def test_what_is_left_out_is_there() -> None:
    everything = names("distributed")
    assert [start for start in LEFT_OUT if not any(name.startswith(start) for name in everything)] == []
