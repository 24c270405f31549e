"""The global threshold over values that lie scattered over the ranks: exact, by sketches and by radix search; and
reused."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from horovod_oktopk.selection.global_top_k import global_top_k, keep_all, radix_kth_magnitude, top_k_by_reuse
from horovod_oktopk.selection.sketches import first_places, sketch_shape
from horovod_oktopk.transport.counting import CountingTransport
from horovod_oktopk.vectors.sparse import SparseVector, from_bits, to_bits
from tests.support.threads import run_ranks

TINY = {"float32": 1e-45, "float64": 5e-324}


def scattered(dtype, size, rng):
    """Return non-zero values of every rank: denormals, ties and all signs."""
    exponents = rng.integers(-44, 38, 40 * size)
    values = (rng.integers(1, 4, 40 * size) * 10.0 ** exponents * rng.choice([-1, 1], 40 * size)).astype(dtype)
    values[::9] = TINY[dtype]
    values[values == 0] = -TINY[dtype]
    return np.split(values, np.sort(rng.integers(0, len(values), size - 1)))


def kth_of_all(parts, k):
    return float(np.sort(np.abs(np.concatenate(parts)))[-k])


def radix(parts, k):
    """Return what local_top_k finds on each rank."""
    found = run_ranks(len(parts), lambda transport: radix_kth_magnitude(to_bits(parts[transport.rank]), k, transport),
                      timeout=10)
    return [from_bits(bits, parts[0].dtype) for bits, *_ in found]


@given(st.sampled_from(["float32", "float64"]), st.integers(1, 6), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_the_radix_search_is_exact(dtype, size, k, seed):
    parts = scattered(dtype, size, np.random.default_rng(seed))
    assert radix(parts, k) == [kth_of_all(parts, k)] * size


@pytest.mark.parametrize("values", [[1.0, -np.inf, 3.0], [-5e-324, 5e-324, 1e-320]])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_radix_search_finds_extreme_values(values, k):
    parts = [np.array(values), np.empty(0)]
    assert radix(parts, k) == [kth_of_all(parts, k)] * 2


def test_the_radix_search_gives_zero_for_fewer_than_k_values():
    assert radix([np.ones(3, np.float32), np.empty(0, np.float32)], 4) == [0.0, 0.0]


def select(parts, k, region_order=None):
    """Return (indices selected, sizes, threshold, traffic) on every rank."""
    order = np.arange(len(parts)) if region_order is None else np.array(region_order)

    def program(transport):
        counting = CountingTransport(transport)
        kept, sizes = global_top_k(parts[transport.rank], k, order, counting)
        return kept.elements.indices.tolist(), sizes.tolist(), kept.threshold, counting.traffic

    return run_ranks(len(parts), program, timeout=10)


def assert_selects(values, size, k, messages=None):
    """Assert that the k largest magnitudes are selected. messages: to each other rank. Return the bytes sent."""
    found = select(on_ranks(values, size), k)
    for indices, sizes, threshold, traffic in found:
        assert (sum(sizes), threshold) == (k, np.sort(np.abs(values))[-k])
        assert len(indices) in sizes
        assert messages is None or traffic.messages_sent == messages * (size - 1)
    return [traffic.bytes_sent for *_, traffic in found]


def on_ranks(values, size):
    """Return regions of a dense vector, about equally long."""
    return [SparseVector(block, values[block]) for block in np.array_split(np.arange(len(values)), size)]


def select_again(parts, k, value, fits=lambda sizes: True):
    """Return (indices selected, sizes, threshold) on every rank; the threshold `value` may be reused."""
    def program(transport):
        kept, sizes = top_k_by_reuse(value, parts[transport.rank], k, np.arange(len(parts)), fits, transport)
        return kept.elements.indices.tolist(), sizes.tolist(), kept.threshold

    return run_ranks(len(parts), program, timeout=10)


def regions(values, region_order):
    """Return equal parts of a dense vector, part j with rank region_order[j]."""
    parts = [None] * len(region_order)
    for block, rank in zip(np.split(np.arange(len(values)), len(region_order)), region_order, strict=True):
        parts[rank] = SparseVector(block, np.asarray(values, np.float32)[block])
    return parts


@pytest.mark.parametrize("region_order", [[0, 1, 2], [1, 2, 0], [2, 0, 1]])
@pytest.mark.parametrize("copies", [1, 60])
@pytest.mark.parametrize("k", range(1, 7))
def test_ties_go_to_the_lower_index_whoever_owns_it(region_order, k, copies):
    found = select(regions(np.repeat([1, 2, 1, 1, -1, 1], copies), region_order), k * copies, region_order)
    by_one = [1, 0, 2, 3, 4, 5][:k]
    expected = sorted(copies * index + copy for index in by_one for copy in range(copies))
    assert sorted(index for indices, *_ in found for index in indices) == expected
    assert all(sizes == [len(indices) for indices, *_ in found] for _, sizes, *_ in found)


@given(st.sampled_from(["float32", "float64"]), st.integers(1, 4), st.integers(1, 60), st.integers(0, 2**32 - 1))
def test_all_ranks_know_the_ends_of_what_was_selected(dtype, size, k, seed):
    """Ends are known of few elements, after a radix search, and with a reused threshold."""
    values = np.random.default_rng(seed).standard_normal(40).astype(dtype)
    parts = on_ranks(values, size)

    def program(transport):
        mine, order = parts[transport.rank], np.arange(size)
        exact, _ = global_top_k(mine, k, order, transport)
        again, _ = top_k_by_reuse(exact.threshold, mine, k, order, lambda _: True, transport)
        return [(kept.ends, np.abs(kept.elements.values).tolist()) for kept in (exact, again)]

    for by_rank in zip(*run_ranks(size, program, timeout=10), strict=True):
        assert len({ends for ends, _ in by_rank}) == 1
        lowest, largest = by_rank[0][0]
        chosen = [value for _, part in by_rank for value in part]
        assert largest == max(chosen) == np.abs(values).max()
        assert lowest == (min(chosen) if k < 40 else 0) or lowest == min(chosen)


@pytest.mark.parametrize("select", ["exact", "reuse", "all"])
def test_where_all_is_selected_the_ends_begin_with_the_least_local_threshold(select):
    parts, floors = regions([5, 0.1, 3, 2], [0, 1]), [4.0, 0.0, 2.0]

    def program(transport):
        floor = floors[transport.rank]
        mine = parts[transport.rank] if transport.rank < 2 else SparseVector.empty(np.float32)
        if select == "exact":
            kept, _ = global_top_k(mine, 10, np.arange(3), transport, floor)
        elif select == "reuse":
            kept, _ = top_k_by_reuse(1.0, mine, 10, np.arange(3), lambda _: True, transport, floor)
        else:
            kept, _ = keep_all(mine, transport, floor)
        return kept.ends

    assert run_ranks(3, program, timeout=10) == [(2.0, 5.0)] * 3


@pytest.mark.parametrize(("floors", "keeps_zeros"), [([9.0, 6.0], False), ([2.0, 0.0], True)])
def test_the_least_end_is_not_known_if_all_sums_are_smaller_or_zeros_are_kept(floors, keeps_zeros):
    parts = [SparseVector(np.array([0, 1]), np.array([5, 3], np.float32)),
             SparseVector(np.array([2, 3]), np.array([0, 4], np.float32))]

    def program(transport):
        kept, sizes = keep_all(parts[transport.rank], transport, floors[transport.rank], keeps_zeros)
        return kept.ends, sizes.tolist()

    assert run_ranks(2, program, timeout=10) == [((0.0, 5.0), [2, 2 if keeps_zeros else 1])] * 2


def test_zero_sums_are_never_selected():
    found = select(regions([0, 1, 0, 0], [0, 1]), 4)
    assert [indices for indices, *_ in found] == [[1], []]


@example(dtype="float64", size=1, k=1004, seed=1, unevenness=50.0)
@given(st.sampled_from(["float32", "float64"]), st.integers(1, 6), st.integers(1, 2100), st.integers(0, 2**32 - 1),
       st.sampled_from([1.0, 2.0, 50.0]))
def test_the_top_k_is_exact(dtype, size, k, seed, unevenness):
    """With ties, crowded magnitudes and ranks of very different ones."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(2000).astype(dtype)
    values[:600] *= unevenness
    values[rng.integers(0, 2000, 300)] = rng.choice([-1, 1])
    values[rng.integers(0, 2000, 300)] = 0.9 + rng.random(300) * 1e-3
    values[values == 0] = 1
    exact = np.sort(np.argsort(-np.abs(values), kind="stable")[:k])
    found = select(on_ranks(values, size), k)
    kth = float(np.abs(values[exact]).min()) if k <= 2000 else 0.0
    for _, sizes, threshold, _ in found:
        assert sizes == [len(indices) for indices, *_ in found]
        assert threshold in (kth, 0.0 if k == 2000 else kth)
    assert [index for indices, *_ in found for index in indices] == exact.tolist()


EIGHT, FORTY = 8, 40
RADIX = 1 + 4 * 2 + 1
NORMAL = np.random.default_rng(0).standard_normal(8000).astype(np.float32)
CROWDED = np.sign(NORMAL) * (1 + np.abs(NORMAL) * np.float32(1e-5))
ONE_RANK = np.concatenate([NORMAL[:1000] * 100, NORMAL[1000:]])
MANY_EQUAL = np.where(np.arange(8000) % 8 == 0, 5, np.where(np.arange(8000) % 25 == 1, 9, NORMAL / 9)).astype("f4")


@pytest.mark.parametrize("values", [NORMAL, CROWDED], ids=["normal", "crowded"])
@pytest.mark.parametrize("k", [1, 10, 800, 7999])
def test_two_messages_suffice_however_magnitudes_are_distributed(values, k):
    assert_selects(values, EIGHT, k, messages=2)


@pytest.mark.parametrize("values", [NORMAL, CROWDED, np.sort(np.abs(NORMAL))], ids=["normal", "crowded", "sorted"])
@pytest.mark.parametrize("k", [1, 10, 800, 7999])
def test_the_top_k_of_many_ranks_is_exact(values, k):
    assert_selects(values, FORTY, k)


@pytest.mark.parametrize("k", [800, 3000])
def test_the_two_messages_are_short(k):
    """Together about as long as a tenth of the values that are selected."""
    entries, step = sketch_shape(k, EIGHT)
    sent = assert_selects(NORMAL, EIGHT, k, messages=2)
    assert max(sent) <= 4 * 7 * (entries + 1 + 3 * step)


@pytest.mark.parametrize(("values", "messages"), [
    (MANY_EQUAL, 2), (ONE_RANK, RADIX), (np.full(8000, 5.0, "f4"), RADIX)],
                         ids=["many are equal", "one rank has all", "all are equal"])
def test_equal_elements_are_counted_and_a_radix_search_takes_over_where_sketches_do_not_tell(values, messages):
    """Many are equal as values of 4 bits are: there is no need to gather them."""
    assert_selects(values, EIGHT, 800, messages)


@pytest.mark.parametrize("past", [-1, 0, 1])
def test_magnitudes_of_which_many_are_equal_are_gathered_with_their_counts(past):
    """Sums of values in 4 bits are like this; here around the last of those that equal 7."""
    values = np.random.default_rng(1).integers(1, 10, 8000).astype("f4")
    k = int((values >= 7).sum()) + past
    assert_selects(values, EIGHT, k, messages=3)


TEN = regions(np.arange(1, 21), [0, 1])


@pytest.mark.parametrize(("value", "count"), [(11.0, 10), (9.0, 12), (13.0, 8)])
def test_within_the_guard_a_threshold_is_reused(value, count):
    for rank, (indices, sizes, threshold) in enumerate(select_again(TEN, 10, value)):
        assert threshold == value
        assert sum(sizes) == count
        assert len(indices) == sizes[rank]


@pytest.mark.parametrize(("value", "fits"), [(28.0, True), (4.0, True), (0.0, True), (99.0, True), (12.0, False)])
def test_a_threshold_that_deviates_too_far_or_would_send_too_much_is_replaced_from_the_sketches(value, fits):
    for _, sizes, threshold in select_again(TEN, 10, value, lambda sizes: fits):
        assert (sizes, threshold) == ([0, 10], 11.0)


@given(st.integers(1, 6), st.integers(1, 700), st.integers(0, 2**32 - 1), st.sampled_from([1.0, 30.0]))
def test_sketches_select_nearly_the_exact_top_k(size, k, seed, unevenness):
    """At most k, less a step of k/(16 P) at most; each rank leaves out less than a step of the exact top k."""
    values = np.random.default_rng(seed).standard_normal(1500).astype(np.float32)
    values[:300] *= unevenness
    found = select_again(on_ranks(values, size), k, 1e-30)
    selected = [index for indices, _, _ in found for index in indices]
    step = -(-k // (16 * size))
    assert len(selected) == len(set(selected)) == sum(found[0][1])
    assert k - step <= len(selected) <= k
    exact = np.argsort(-np.abs(values), kind="stable")[:k].tolist()
    assert len(set(exact) - set(selected)) <= size * (step - 1) + k - len(selected)
    assert len({threshold for _, _, threshold in found}) == 1


def test_where_a_sketch_is_too_short_all_re_evaluate_exactly():
    """One rank of eight holds all of the top k, and its sketch tells of k/2."""
    values = np.concatenate([np.arange(1000, 2000), np.ones(7000)]).astype(np.float32)
    for _, sizes, threshold in select_again(on_ranks(values, EIGHT), 640, 1e-30):
        assert (sizes, threshold) == ([640] + [0] * 7, 1360.0)


def test_of_no_elements_nothing_is_kept_and_nothing_is_sent():
    for indices, sizes, threshold, traffic in select(on_ranks(NORMAL, EIGHT), 0):
        assert (indices, sizes, threshold, traffic.messages_sent) == ([], [0] * EIGHT, 0.0, 0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_of_fewer_than_k_denormals_all_are_selected(dtype):
    for _, sizes, threshold, _ in select([SparseVector(np.arange(16), np.full(16, TINY[dtype], dtype))], 17):
        assert (sizes, threshold) == ([16], 0.0)


@pytest.mark.parametrize("alike", [False, True])
def test_of_many_ranks_two_messages_suffice_that_are_shorter_than_what_is_certain(alike):
    """Also where all ranks have the same magnitudes, and only the places of their entries differ."""
    values = np.random.default_rng(3).standard_normal(40_000).astype(np.float32)
    if alike:
        values = np.tile(values[:1000], FORTY) * (1 + np.arange(40_000, dtype=np.float32) * 1e-6)
    entries, step = sketch_shape(4000, FORTY)
    sent = assert_selects(values, FORTY, 4000, messages=2)
    assert max(sent) < 4 * (FORTY - 1) * (entries + 0.8 * 2 * step)


def test_where_one_of_many_ranks_has_more_than_is_likely_all_look_where_it_certainly_is():
    """All of its magnitudes between two entries are next to the k-th."""
    k, step = 40_000, sketch_shape(40_000, FORTY)[1]
    values = np.random.default_rng(3).exponential(1.0, 120_000).astype(np.float32)
    first = np.sort(values[:3000])[::-1]
    after = first_places(step, FORTY)[0] - 1 + np.arange(0, 2000, step)
    entry = after[first[after] > np.sort(values)[-k]][-1]
    values[:3000] = first
    values[entry + 1:entry + step] = np.sort(values)[-k] * (1 + np.linspace(1e-5, -1e-5, step - 1, dtype=np.float32))
    assert_selects(values, FORTY, k, messages=3)


@pytest.mark.parametrize("more", [0, -1], ids=["below", "above"])
def test_where_the_kth_of_many_ranks_is_not_where_it_is_likely_all_look_where_it_certainly_is(more):
    """On every rank the last entry that is larger is the last magnitude that is (below), or the next one would be."""
    def larger(entries, step):
        return first_places(step, FORTY) + step * entries + more

    random = np.random.default_rng(3)
    counts = next(larger(*shape) for shape in product(range(3, 60), range(10, 100))
                  if sketch_shape(int(larger(*shape).sum()), FORTY)[1] == shape[1])
    values = [np.concatenate([random.uniform(1, 2, count), random.uniform(0.1, 1, 3000 - count)]) for count in counts]
    values = np.concatenate(values).astype(np.float32)
    k = int((values > 1).sum())
    assert_selects(values, FORTY, k, messages=3)
