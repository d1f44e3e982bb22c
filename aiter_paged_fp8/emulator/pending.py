"""Memory operations on their way: what was issued and what it will do when it takes effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .operation import Operation
    from .state import Group, Rect


def _cut(value: Any, index: tuple[slice, slice]) -> Any:
    if isinstance(value, np.ndarray):
        return value[index]
    if isinstance(value, tuple):
        return tuple(_cut(part, index) for part in value)
    if isinstance(value, list):
        return [_cut(part, index) for part in value]
    return value


def _join(parts: list[Any], axis: int) -> Any:
    first = parts[0]
    if isinstance(first, np.ndarray):
        return np.concatenate(parts, axis=axis)
    if isinstance(first, (tuple, list)):
        return type(first)(_join([part[k] for part in parts], axis) for k in range(len(first)))
    return first


class Pending:
    """One issued memory operation of a group.

    Attributes
    ----------
    op : Operation
    effect : callable
        ``effect(group, payload)`` moves the data.
    payload : tuple
        Addresses, masks and data; every array has the leading axes ``[waves, workgroups]``, so that a group can split.
    done : bool
        Whether the effect has taken place (the counter may still be waited for).
    in_order : bool
        Whether a partial wait may retire it (scalar loads return out of order).
    events : list
        What the race check noted at issue; they are published when the wait has happened.
    """

    __slots__ = ("done", "effect", "events", "in_order", "op", "payload")

    def __init__(
        self,
        op: Operation,
        effect: Callable[[Group, Any], None],
        payload: Any,
        *,
        in_order: bool = True,
        events: tuple[Any, ...] = (),
    ) -> None:
        self.op = op
        self.effect = effect
        self.payload = payload
        self.done = False
        self.in_order = in_order
        self.events = events

    def cut(self, inner: Rect, outer: Rect) -> Pending:
        """Return the part of a sub-rectangle."""
        part = Pending(
            self.op, self.effect, _cut(self.payload, inner.within(outer)), in_order=self.in_order, events=self.events
        )
        part.done = self.done
        return part

    def same_as(self, other: Pending) -> bool:
        """Whether both stand for the same instruction in the same state, so that groups that hold them may join."""
        return self.op is other.op and self.done == other.done and _same_shape(self.payload, other.payload)

    @staticmethod
    def join(parts: list[Pending], axis: int) -> Pending:
        """Join the operations of neighbouring groups."""
        first = parts[0]
        events: tuple[Any, ...] = ()
        for part in parts:
            events += tuple(event for event in part.events if event not in events)
        joined = Pending(
            first.op,
            first.effect,
            _join([part.payload for part in parts], axis),
            in_order=first.in_order,
            events=events,
        )
        joined.done = first.done
        return joined


def _same_shape(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return isinstance(a, np.ndarray) and isinstance(b, np.ndarray) and a.ndim == b.ndim
    if isinstance(a, (tuple, list)):
        return type(a) is type(b) and len(a) == len(b) and all(_same_shape(x, y) for x, y in zip(a, b, strict=True))
    return a is b or bool(a == b)
