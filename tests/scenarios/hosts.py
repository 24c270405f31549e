"""Each host is one worker: `hierarchical`. A job's ranks are on one machine: some of them are taken for a host's."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from horovod_oktopk import OkTopk, OptionError, Partial, PluginError
from horovod_oktopk.transport.horovod import HorovodRanks
from tests.scenarios.common import (
    DENSE,
    assert_conserved,
    assert_disagreement,
    assert_options_must_agree,
    environment,
    everywhere,
    flat,
    gradients,
    host_sizes,
    is_last,
    needs,
    needs_ranks,
    raised_everywhere,
    shared_folder,
    take_steps,
    total,
)
from tests.scenarios.driver import Kind


def check_the_average_is_over_all_ranks(kind: Kind) -> None:
    hvd = kind.hvd
    needs_ranks(hvd)
    for length in host_sizes(hvd.size()):
        trainer = kind(replace(DENSE, hierarchical=length), op=hvd.Average)
        trainer.step(gradients(0, hvd.rank()))
        np.testing.assert_allclose(flat(trainer.values()), -total(hvd, 0) / hvd.size(), rtol=1e-6)


def check_hosts_as_they_are(kind: Kind) -> None:
    """All ranks of a job on this machine are on one host: nothing leaves it."""
    hvd = kind.hvd
    trainer = kind(OkTopk(density=0.1, hierarchical=True), op=hvd.Sum)
    take_steps(hvd, trainer, *range(3))
    sent = everywhere(hvd, trainer.report().payload_bytes()[0])
    assert sent == [0] * hvd.size()
    assert_conserved(hvd, trainer, total(hvd, *range(3)))


def check_a_rank_keeps_its_share_of_the_residual(kind: Kind) -> None:
    hvd = kind.hvd
    needs_ranks(hvd)
    trainer = kind(OkTopk(density=0.1, hierarchical=hvd.size()), op=hvd.Sum)
    take_steps(hvd, trainer, 0, 1)
    shares = np.array(everywhere(hvd, trainer.residual())) != 0
    assert shares.any(axis=1).all(), "each rank holds something"
    assert shares.sum(axis=0).max() == 1, "no two hold the same element"


def check_ranks_that_differ_all_raise(kind: Kind) -> None:
    """One of a host, and all of one."""
    hvd = kind.hvd
    needs_ranks(hvd)
    assert_options_must_agree(
        kind, *((OkTopk(density=0.2, hierarchical=length), OkTopk(density=0.1, hierarchical=length),
                 "density: 0.1", "density: 0.2") for length in host_sizes(hvd.size())),
        (OkTopk(density=0.1, hierarchical=hvd.size()), OkTopk(density=0.1, hierarchical=1),
         "different options hierarchical"))


def check_a_rank_that_saves_alone_is_told(kind: Kind) -> None:
    hvd = kind.hvd
    needs_ranks(hvd)
    needs(kind.saves_together, "a state that all ranks save together")
    for length in (False, *host_sizes(hvd.size())):
        trainer = kind(OkTopk(density=0.1, hierarchical=length))
        trainer.step(gradients(0, hvd.rank()))
        with shared_folder(hvd) as folder:
            save, go_on = partial(trainer.save, f"{folder}/state"), partial(take_steps, hvd, trainer, 1)
            assert_disagreement(hvd, save if is_last(hvd) else go_on, "save the state to a file")


def check_hosts_with_different_numbers_of_ranks_are_refused(kind: Kind) -> None:
    hvd = kind.hvd
    needs(hvd.size() > 2, "3 ranks")
    trainer = kind(OkTopk(density=0.1, hierarchical=hvd.size() - 1))
    for message in raised_everywhere(hvd, PluginError, partial(take_steps, hvd, trainer, 0)):
        assert "needs hosts with equally many ranks" in message
        assert f"got [{hvd.size() - 1}, 1] ranks" in message


def check_process_sets_that_cannot_be_made_are_refused(kind: Kind) -> None:
    hvd = kind.hvd
    needs(hvd.size() > 2, "3 ranks")
    needs(hasattr(hvd, "mpi_ops"), "Horovod's own process sets")
    known, unknown = np.arange(hvd.size() - 1), np.array([0, hvd.size() - 1])
    ranks = HorovodRanks(hvd.global_process_set, kind.collectives)
    with environment(HOROVOD_DYNAMIC_PROCESS_SETS="0"), pytest.raises(
            PluginError, match=rf'missing are \[\[0, {unknown[1]}\]\].*init\(process_sets="dynamic"\)'):
        ranks.divide([known, unknown])


def check_a_state_that_was_saved_goes_on(kind: Kind) -> None:
    """With the same bits on as many hosts; where each rank is a worker, with the same sum of residuals."""
    hvd = kind.hvd
    needs_ranks(hvd)
    options = OkTopk(density=0.1, hierarchical=hvd.size())
    trainer = kind(options, op=hvd.Sum)
    take_steps(hvd, trainer, *range(4))
    with shared_folder(hvd) as folder:
        trainer.save(f"{folder}/state")
        resumed, flat_one = kind(options, op=hvd.Sum), kind(replace(options, hierarchical=False), op=hvd.Sum)
        for each in (resumed, flat_one):
            each.step(gradients(8, hvd.rank()))  # so that there is something to load into
            each.load(f"{folder}/state")
            each.assign(trainer.values())
        for each in (trainer, resumed, flat_one):
            each.step(gradients(5, hvd.rank()))
            assert_conserved(hvd, each, total(hvd, 0, 1, 2, 3, 5))
    assert flat(trainer.values()).tobytes() == flat(resumed.values()).tobytes()
    assert trainer.residual().tobytes() == resumed.residual().tobytes()


def check_elastic_jobs_are_refused(kind: Kind) -> None:
    needs_ranks(kind.hvd)
    trainer = kind(OkTopk(density=0.1, hierarchical=True))
    with environment(HOROVOD_ELASTIC="1"):
        for message in raised_everywhere(kind.hvd, PluginError, partial(take_steps, kind.hvd, trainer, 0)):
            assert "hierarchical cannot be used in an elastic job" in message


def check_what_does_not_work_on_hosts_is_refused(_: Kind) -> None:
    for make, told in ((lambda: Partial(OkTopk(hierarchical=True)), "hierarchical=True"),
                       (lambda: OkTopk(hierarchical=0), "must be an integer of at least 1, or True or False")):
        with pytest.raises(OptionError, match=told):
            make()
