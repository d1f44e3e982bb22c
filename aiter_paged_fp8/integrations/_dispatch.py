"""In front of ``mha_batch_prefill_func``: bind arguments by name, try the native path, hand back the rest."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..api import Result, flydsl_flash_attn_batch_prefill_func, plan
from ..kernels.fmha_gfx950 import traits
from ..options import current_options
from ..planner import device_arch
from ..request import E4M3, describe

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

#: AITER's argument list of the contract has one home, the dispatcher's own signature.
CONTRACT = inspect.signature(flydsl_flash_attn_batch_prefill_func).parameters
_ORDER = tuple(CONTRACT)
_REQUIRED = frozenset(name for name, parameter in CONTRACT.items() if parameter.default is parameter.empty)
#: What `describe` takes of the contract's list; everything else is a feature that only the original has.
_DESCRIBED = frozenset(CONTRACT) & frozenset(inspect.signature(describe).parameters)
_NAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_PLAIN = (bool, int, float, str, tuple, type(None))


def _same(value: object, default: object) -> bool:
    """Whether an argument is what leaving it out would mean. Tensors compare element by element, so only plain values
    are compared."""
    return value is default or (type(value) in _PLAIN and type(value) is type(default) and value == default)


class Form(Enum):
    """What a call's form says: back to the original, or to the dispatcher as it is or rearranged."""

    BACK = "back"
    AS_IT_IS = "as it is"
    BY_NAME = "by name"


class Binder:
    """Arguments by name, over the union of the contract's list and one function's own signature.

    Positional arguments mean what the installed function says that they mean. Where its list is the beginning of the
    contract's, as in older releases, further positions are the contract's. A name that only the installed function
    has must be left at its default; a default that differs from the contract's is passed on.
    """

    def __init__(self, function: Function) -> None:
        try:
            parameters = inspect.signature(function).parameters
        except (TypeError, ValueError):  # a builtin tells nothing: then the contract's list is all there is
            parameters = CONTRACT
        own = {name: parameter for name, parameter in parameters.items() if parameter.kind in _NAMED}
        order = tuple(name for name, parameter in own.items() if parameter.kind is not parameter.KEYWORD_ONLY)
        self.positions = _ORDER if _ORDER[: len(order)] == order else order
        self.others = {name: own[name].default for name in own if name not in CONTRACT}
        self.implied = {
            name: parameter.default
            for name, parameter in own.items()
            if name in CONTRACT
            and parameter.default is not parameter.empty
            and not _same(parameter.default, CONTRACT[name].default)
        }
        # Callers make calls of a few forms only; names are compared once for each form.
        self.forms: dict[tuple[object, ...], Form] = {}

    def form(self, count: int, names: tuple[str, ...]) -> Form:
        """What to do with calls of ``count`` positions and these keywords."""
        positions = self.positions[:count]
        given = {*positions, *names}
        if count > len(positions) or len(given) != count + len(names):  # too many, or one twice: the original's error
            return Form.BACK
        if not given <= CONTRACT.keys() | self.others.keys() or not given | self.implied.keys() >= _REQUIRED:
            return Form.BACK
        if positions == _ORDER[:count] and self.implied.keys() <= given <= CONTRACT.keys():
            return Form.AS_IT_IS
        return Form.BY_NAME

    def __call__(self, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        """Arguments of the dispatcher; None for a call that only the original can understand, or refuse."""
        key = (len(args), *kwargs)
        form = self.forms.get(key)
        if form is None:
            form = self.form(len(args), tuple(kwargs))
            if len(self.forms) < 512:
                self.forms[key] = form
        if form is Form.AS_IT_IS:
            return args, kwargs
        if form is Form.BACK:
            return None
        bound = {**self.implied, **dict(zip(self.positions, args, strict=False)), **kwargs}
        for name, default in self.others.items():
            if not _same(bound.pop(name, default), default):
                return None
        return (), bound


def _bind(args: Args, kwargs: Kwargs) -> Kwargs:
    return inspect.signature(flydsl_flash_attn_batch_prefill_func).bind(*args, **kwargs).arguments


def _described(bound: Kwargs) -> Kwargs:
    """What the public function takes of a batch call, with the one rule by which they differ: a single query sees all
    keys, causal or not."""
    return {
        **{name: value for name, value in bound.items() if name in _DESCRIBED},
        "causal": bound.get("causal", False) or bound["max_seqlen_q"] == 1,
    }


def _is_refusal(args: Args, kwargs: Kwargs) -> bool:
    """Whether describing a call already raises NotImplementedError: nothing has been written then."""
    try:
        describe(**_described(_bind(args, kwargs)))
    except NotImplementedError:
        return True
    return False


def _may_be_native(args: Args, kwargs: Kwargs) -> bool:
    """Whether a call that went back may be native without the feature that it asked for; True where that is unknown."""
    described = _described(_bind(args, kwargs))
    try:
        return plan(**described).path == "paged"
    except (TypeError, ValueError, NotImplementedError):
        return True


@functools.lru_cache(maxsize=64)
def is_native_machine(index: int) -> bool:
    """Whether the native kernel can run at all on the GPU of that index, -1 being no GPU. Elsewhere every call is the
    original's, and not even validated. (A number, since hashing a torch.device takes half a microsecond.)"""
    return index >= 0 and device_arch(torch.device("cuda", index)) == traits.ARCH


class Server:
    """Calls to the native path, for one function that stands behind it.

    Validating and planning a call takes longer than all else here, so that what one call of a shape was planned to be
    is remembered for the next: the facts that a plan depends on are in the key. A call that can't be native goes back
    at once then, unvalidated, as it does on any machine that is not native.
    """

    def __init__(self) -> None:
        self.native: dict[tuple[Any, ...], bool] = {}

    def __call__(self, args: Args, kwargs: Kwargs) -> Result | None:
        """The result of a call that the native path takes; None for one that goes back.

        Raises
        ------
        Exception
            Whatever the dispatcher raises, but a NotImplementedError of the description of a call, such as for a
            cache that would have to be copied: the original may well serve that. One from a kernel propagates like
            any other of its errors. A forced executor is binding: what it can't serve raises.
        """
        if current_options().executor != "auto":
            return flydsl_flash_attn_batch_prefill_func(*args, **kwargs)
        count = len(args)
        q = args[0] if count else kwargs["q"]
        k = args[1] if count > 1 else kwargs["k"]
        v = args[2] if count > 2 else kwargs["v"]
        if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
            return None
        index = q.get_device()
        if not is_native_machine(index):
            return None
        one_query = (args[6] if count > 6 else kwargs["max_seqlen_q"]) == 1
        causal = args[11] if count > 11 else kwargs.get("causal", False)
        facts = (index, k.shape, v.shape, one_query, causal) if isinstance(causal, bool) else None
        if facts is not None and self.native.get(facts) is False:
            return None
        try:
            result = flydsl_flash_attn_batch_prefill_func(*args, **kwargs)
        except NotImplementedError:
            if _is_refusal(args, kwargs):
                return None
            raise
        if result is None and facts is not None and facts not in self.native and len(self.native) < 4096:
            self.native[facts] = _may_be_native(args, kwargs)
        return result


def in_front_of(original: Function, is_installed: Callable[[], bool]) -> Function:
    """A function with the original's name and signature that tries the native path first.

    Parameters
    ----------
    original : callable
        Gets every call that is handed back, with exactly the arguments that came in.
    is_installed : callable
        Asked on each call: closures and other places out of reach may keep this function after an uninstall, and it
        must be the original then.
    """
    bind, serve = Binder(original), Server()

    @functools.wraps(original)
    def mha_batch_prefill_func(*args: Any, **kwargs: Any) -> Any:
        if is_installed() and (bound := bind(args, kwargs)) is not None:
            result = serve(*bound)
            if result is not None:
                return result
        return original(*args, **kwargs)

    return mha_batch_prefill_func


def _brief(value: object) -> str:
    return f"a tensor, shape {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def why_handed_back(bound: Kwargs) -> str:
    """The feature for which the dispatcher returned None, with its argument named."""
    neutral = {
        "dropout_p": 0.0,
        "logits_soft_cap": 0.0,
        "alibi_slopes": None,
        "return_attn_probs": False,
        "kv_block_descale": None,
        "sink_ptr": None,
        "sink_size": 0,
    }
    for name, value in neutral.items():
        came = bound.get(name, value)
        if came is not None if value is None else bool(came):
            return f"{name}: got {_brief(came)}; accepted: {value!r}"
    window = tuple(bound.get("window_size", (-1, -1)))
    if window[:2] != (-1, -1) or any(window[2:]):
        return f"window_size: got {window}; accepted: (-1, -1), with a third element of 0 if any"
    for name in ("q", "k", "v"):
        dtype = getattr(bound.get(name), "dtype", E4M3)
        if dtype is not E4M3:
            return f"{name}: got {dtype}; accepted: {E4M3}"
    for name in ("q_descale", "k_descale", "v_descale"):
        if bound.get(name) is None:
            return f"{name}: got None; accepted: float32, one element"
    try:
        return plan(**_described(bound)).reason
    except ValueError as error:  # pages without last-page lengths, which the public function refuses
        return str(error)


def without_original(*args: Any, **kwargs: Any) -> Any:
    """``mha_batch_prefill_func`` on a machine without AITER: nobody is there to hand a call back to."""
    result = flydsl_flash_attn_batch_prefill_func(*args, **kwargs)
    if result is None:
        reason = why_handed_back(
            inspect.signature(flydsl_flash_attn_batch_prefill_func).bind(*args, **kwargs).arguments
        )
        raise NotImplementedError(
            f"{reason}. This is aiter_paged_fp8's stand-in for mha_batch_prefill_func, and AITER itself, which would "
            "serve this call, is not here"
        )
    return result


without_original.__name__ = without_original.__qualname__ = "mha_batch_prefill_func"
vars(without_original)["__signature__"] = inspect.signature(flydsl_flash_attn_batch_prefill_func)
