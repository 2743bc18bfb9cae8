"""Work that the threads of one launch share: a chain of phases, each of many items, without leaving the launch.

A phase's items are claimed one by one from atomic counters, and a thread goes on to the next phase when all items of
this one are done. A thread waits only for items that another running thread has claimed, never for a thread to come:
one thread alone gets through all phases, so a launch ends however many threads the machine gives it. A thread that
comes late finds nothing left to claim. What a thread reads before its first claim of a phase may therefore be old or
half written; it may use it only if the claim succeeds, because until that item is done nobody gets past the phase.
"""

from __future__ import annotations

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

from kvlab.ops.numba_support import kernel

LINE = 8  # int64 of a cache line: the counters of a phase stand on lines of their own
_SPINS = 2000  # looks at a counter before the core is offered to others
_sched_yield = types.ExternalFunction("sched_yield", types.intc())  # POSIX


@kernel()
def new_phases(count, threads):
    """The counters of `count` phases: int64 [count, 1 + threads, a line], items done, then items claimed by share."""
    return np.zeros((count, 1 + threads, LINE), np.int64)


@kernel()
def claim(team, phase, count, turn):
    """(an item of 0 .. count - 1 that nobody has, or -1 when all are claimed; the turn to ask with next).

    Each thread has a share of neighbouring items, so that it reads in long lines, and helps with the others' afterwards.

    Args:
        team: (phases, the thread's number, number of threads).
        turn: 0 at first: how many shares this thread has seen the end of.
    """
    phases, me, threads = team
    while turn < threads:
        share = (me + turn) % threads
        item = count * share // threads + _fetch_add(phases, (phase * (1 + threads) + 1 + share) * LINE, 1)
        if item < count * (share + 1) // threads:
            return item, turn
        turn += 1
    return -1, turn


@kernel()
def finish(team, phase, done, count) -> None:
    """Adds the `done` items of this thread and returns when all `count` of the phase are done."""
    phases, _, threads = team
    slot = phase * (1 + threads) * LINE
    if done:
        _fetch_add(phases, slot, done)
    looks = 0
    while _load(phases, slot) < count:
        looks += 1
        if looks > _SPINS:
            _sched_yield()


@kernel()
def count_up(counters, index):
    """Adds one to counters[index], int64 [n], and returns what it was."""
    return _fetch_add(counters, index, 1)


@kernel()
def vector(address, count):
    """fp32 [count] at `address`; the caller keeps the memory alive."""
    return numba.carray(_pointer(address), (count,), np.float32)


@kernel()
def matrix(address, rows, columns):
    """fp32 [rows, columns] at `address`."""
    return numba.carray(_pointer(address), (rows, columns), np.float32)


@kernel()
def table_at(address, rows, columns):
    """int32 [rows, columns] at `address`."""
    return numba.carray(_pointer(address), (rows, columns), np.int32)


@kernel()
def integers(address, count):
    """int64 [count] at `address`."""
    return numba.carray(_pointer(address), (count,), np.int64)


def _element(context, builder, signature, args):  # type: ignore[no-untyped-def]
    data = context.make_array(signature.args[0])(context, builder, args[0]).data
    return builder.gep(data, [args[1]])


@intrinsic
def _fetch_add(typingctx, array, index, value):  # type: ignore[no-untyped-def]
    """Atomic: adds to the element of a contiguous int64 array at a flat index, and gives what it was."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.atomic_rmw("add", _element(context, builder, signature, args), args[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), codegen


@intrinsic
def _load(typingctx, array, index):  # type: ignore[no-untyped-def]
    """Atomic read at a flat index: what other threads did before they counted up is seen after it."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.load_atomic(_element(context, builder, signature, args), "seq_cst", 8)

    return types.int64(array, types.int64), codegen


@intrinsic
def _pointer(typingctx, address):  # type: ignore[no-untyped-def]
    """An address as a pointer: a model's arrays are told by their addresses, so that one kernel fits all models."""

    def codegen(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen
