"""Every private name of FlyDSL that this project touches, each checked when it is first used.

FlyDSL's host code (packing of arguments, grid computation) runs as it is; only its last two steps are replaced: the
final pass emits ISA text instead of a code object, and the launch goes to callbacks instead of a GPU runtime. The
replacements act inside an emulator session of their own thread alone, and on artifacts that hold ISA text: hardware
builds of the same process go through the original functions.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ARCHITECTURE = "gfx950"

# module, attribute path, parameters it must still take (None: not checked), what it is for
NAMES: tuple[tuple[str, str, tuple[str, ...] | None, str], ...] = (
    ("flydsl.compiler.jit_function", "_run_pipeline", ("module", "fragments"), "emitting ISA text in the last pass"),
    ("flydsl.compiler.jit_function", "_is_compile_placeholder", ("value",), "launching on CPU tensors"),
    ("flydsl.compiler.jit_function", "_has_live_device_argument", ("value",), "launching on CPU tensors"),
    ("flydsl.compiler.jit_function", "_artifact_cache_key", ("asm", "cfg", "backend"), "own keys for ISA artifacts"),
    ("flydsl.compiler.jit_function", "_build_call_spec", ("sig", "args_tuple"), "names of tensor arguments"),
    ("flydsl.compiler.jit_function", "_call_state_from_spec", ("call_spec", "artifact"), "arguments of a launch"),
    ("flydsl.compiler.jit_function", "JitFunction._ensure_cache_manager", ("self",), "an own disk cache"),
    ("flydsl.compiler.jit_function", "JitFunction._compile_or_execute", ("self",), "compiling one kernel at a time"),
    ("flydsl.compiler.jit_function", "JitCacheManager", ("cache_dir",), "an own disk cache"),
    ("flydsl.compiler.jit_executor", "CallState.__call__", ("self", "args_tuple"), "arguments of a launch"),
    ("flydsl.compiler.jit_executor", "CompiledArtifact._ensure_engine", ("self",), "engines without a GPU runtime"),
    ("flydsl.compiler.jit_executor", "_resolve_runtime_libs", (), "engines without a GPU runtime"),
    ("flydsl.compiler.jit_executor", "ExecutionEngine", None, "engines with our launch callbacks"),
    ("flydsl.compiler.jit_executor", "ExecutionEngine.raw_register_runtime", None, "registering launch callbacks"),
    ("flydsl.compiler.jit_executor", "GpuJitModule", ("engine", "modules"), "engines without a GPU runtime"),
    ("flydsl.compiler.jit_argument", "TorchTensorJitArg", None, "tensors behind arguments"),
    ("flydsl.compiler.jit_argument", "DLTensorJitArg", None, "tensors behind arguments"),
    ("flydsl.compiler.jit_argument", "PointerJitArg", None, "bare pointers among arguments"),
    ("flydsl.compiler.jit_function", "CompiledFunction.__call__", ("self",), "checking the target of compiled kernels"),
    ("flydsl.expr.struct", "is_struct_type", None, "tensors inside struct arguments"),
    ("flydsl.expr.struct", "_runtime_fields", None, "tensors inside struct arguments"),
)

# Where FlyDSL keeps code objects.
CACHE_VARIABLE = "FLYDSL_RUNTIME_CACHE_DIR"

# How a compiled module names what its code is for.
TARGET = re.compile(r'#rocdl\.target<[^>]*chip = "(\w+)"')

# What the ISA pass leaves in an artifact in place of a code object.
ISA_MARK = 'assembly = "'


class FlyDSLChanged(RuntimeError):
    """The installed FlyDSL lacks a private name that the emulator's take-over builds on."""


def lookup(module: str, path: str) -> Any:
    """Resolve a private name, or say which one is gone."""
    import flydsl

    version = getattr(flydsl, "__version__", "?")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        purpose = next((why for where, name, _, why in NAMES if (where, name) == (module, path)), "the take-over")
        raise FlyDSLChanged(
            f"FlyDSL {version} has no {module}.{path}, which {purpose} needs; adapt runtime/flydsl_private.py"
        ) from error
    return found


def check_names() -> None:
    """Check every private name and its parameters; raise FlyDSLChanged with one clear sentence."""
    import inspect

    import flydsl

    for module, path, parameters, purpose in NAMES:
        found = lookup(module, path)
        if parameters is None:
            continue
        present = tuple(inspect.signature(found).parameters)
        if any(parameter not in present for parameter in parameters):
            raise FlyDSLChanged(
                f"FlyDSL {flydsl.__version__}: {module}.{path} takes {present}, but {purpose} needs it to take "
                f"{parameters}; adapt runtime/flydsl_private.py"
            )


class Receiver:
    """Who gets the launches of this thread: implemented by an emulator session."""

    launching = True
    cache_dir: Path | None = None

    def begin_call(self, arguments: list[tuple[str, Any]]) -> None:
        """Host code is about to launch with these tensors: ``(name, tensor)``."""
        raise NotImplementedError

    def end_call(self) -> None:
        """Host code is done; raise what went wrong inside it."""
        raise NotImplementedError

    def launch(
        self, isa: str, kernel: str, grid: tuple[int, ...], block: tuple[int, ...], lds: int, parameters: list[int]
    ) -> None:
        """A kernel is launched; parameters are addresses of the argument values."""
        raise NotImplementedError


_local = threading.local()
# Held while FlyDSL compiles: options of its compiler are process-wide. Nothing else is waited for inside.
_lock = threading.RLock()
_inside = 0
_outside: dict[str, str | None] = {}
_installed = False
_modules: list[str] = []
_functions: list[tuple[str, str]] = []
_callbacks: dict[str, Any] = {}


def active() -> Receiver | None:
    """Receiver of this thread."""
    return getattr(_local, "receiver", None)


@contextlib.contextmanager
def receiving(receiver: Receiver) -> Iterator[None]:
    """Send this thread's launches to a receiver."""
    install()
    previous = active()
    _local.receiver = receiver
    try:
        with target_environment():
            yield
    finally:
        _local.receiver = previous


@contextlib.contextmanager
def target_environment() -> Iterator[None]:
    """Let FlyDSL compile for gfx950: it reads its target from process-wide variables.

    All who are inside want the same values, so nobody waits: the first one in sets them, the last one out restores
    what was there.
    """
    global _inside
    with _lock:
        if not _inside:
            wanted = {"FLYDSL_GPU_ARCH": ARCHITECTURE, "ARCH": ARCHITECTURE}
            if "ROCM_PATH" not in os.environ:
                # MLIR looks for a linker there at the latest; ISA text needs none.
                wanted["ROCM_PATH"] = os.devnull
            _outside.update({name: os.environ.get(name) for name in wanted})
            os.environ.update(wanted)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _restore(_outside)
                _outside.clear()


def _restore(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class _CompileOnly(Receiver):
    """Makes what is compiled ISA text; nothing is launched."""

    launching = False

    def __init__(self, cache_dir: Path | None) -> None:
        self.cache_dir = cache_dir


@contextlib.contextmanager
def compiling(*, emulated: bool, cache_dir: Path) -> Iterator[None]:
    """Compile for gfx950: ISA text for the emulator, or code objects for hardware, each in a cache of its own.

    Parameters
    ----------
    emulated : bool
    cache_dir : path
        Parent of both caches.
    """
    if emulated:
        with receiving(_CompileOnly(cache_dir / "emulator")):
            yield
        return
    with _lock, target_environment():
        before: dict[str, str | None] = {CACHE_VARIABLE: os.environ.get(CACHE_VARIABLE)}
        os.environ[CACHE_VARIABLE] = str(cache_dir / "hardware")
        try:
            yield
        finally:
            _restore(before)


def check_target(compiled: Any) -> None:
    """Make sure that a compiled function holds code for gfx950: the target comes from process-wide variables."""
    found = set(TARGET.findall(compiled._keepalive._ir_text))
    if found != {ARCHITECTURE}:
        came = ", ".join(sorted(found)) or "no target that can be read"
        raise FlyDSLChanged(f"compiled kernel: got {came}; accepted: {ARCHITECTURE}")


def stream(raw: Any) -> Any:
    """A stream argument of a launcher."""
    import flydsl.expr as fx

    return fx.Stream(raw)


def holds_isa(artifact: Any) -> bool:
    """Whether a compiled artifact holds ISA text rather than a code object."""
    return ISA_MARK in artifact._ir_text


def tensors_of(value: Any, name: str) -> list[tuple[str, Any]]:
    """Tensors behind one argument of a launcher."""
    kind = type(value)
    if hasattr(value, "torch_tensor"):
        return [(name, value.torch_tensor)]
    if hasattr(value, "dltensor"):
        return [(name, value.dltensor)]
    if hasattr(value, "data_ptr") and hasattr(value, "stride"):
        return [(name, value)]
    if lookup("flydsl.expr.struct", "is_struct_type")(kind):
        fields = lookup("flydsl.expr.struct", "_runtime_fields")(value)
        return [found for field, inner in fields for found in tensors_of(inner, f"{name}.{field}")]
    return []


class _NamedSpec(tuple):
    """A call specification that remembers the launcher's parameter names."""

    names: tuple[str, ...] = ()


def _runtime_callbacks() -> dict[str, Any]:
    """The GPU runtime functions that FlyDSL's host code calls, as ctypes callbacks."""
    pointer, index, int32, size = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int32, ctypes.c_size_t

    def load(data: int, level: int, length: int) -> int:
        text = ctypes.string_at(data, length) if length else ctypes.string_at(data)
        with _lock:
            _modules.append(text.rstrip(b"\0").decode())
            return len(_modules)

    def get_function(module: int, name: int) -> int:
        with _lock:
            _functions.append((_modules[module - 1], ctypes.string_at(name).decode()))
            return len(_functions)

    def launch(
        function: int,
        gx: int,
        gy: int,
        gz: int,
        bx: int,
        by: int,
        bz: int,
        lds: int,
        stream: int | None,
        parameters: int,
        extra: int | None,
        count: int,
    ) -> None:
        receiver = active()
        assert receiver is not None
        isa, kernel = _functions[function - 1]
        values = (ctypes.c_void_p * count).from_address(parameters) if count else ()
        receiver.launch(isa, kernel, (gx, gy, gz), (bx, by, bz), lds, [value or 0 for value in values])

    signatures: dict[str, tuple[Callable[..., Any], Any, list[Any]]] = {
        "mgpuModuleLoadJIT": (load, pointer, [pointer, int32, size]),
        "mgpuModuleLoad": (lambda data, length: load(data, 0, length), pointer, [pointer, size]),
        "mgpuModuleUnload": (lambda module: None, None, [pointer]),
        "mgpuModuleGetFunction": (get_function, pointer, [pointer, pointer]),
        "mgpuLaunchKernel": (launch, None, [pointer, *[index] * 6, int32, pointer, pointer, pointer, size]),
        "mgpuStreamCreate": (lambda: 0, pointer, []),
        "mgpuStreamSynchronize": (lambda stream: None, None, [pointer]),
        "mgpuStreamDestroy": (lambda stream: None, None, [pointer]),
    }
    return {name: ctypes.CFUNCTYPE(result, *args)(fn) for name, (fn, result, args) in signatures.items()}


def install() -> None:
    """Put the replacements in place, once per process."""
    global _installed
    with _lock:
        if _installed:
            return
        check_names()
        _callbacks.update(_runtime_callbacks())
        _replace_compiler()
        _replace_executor()
        _installed = True


def _replace_compiler() -> None:
    function: Any = importlib.import_module("flydsl.compiler.jit_function")
    originals = {
        name: getattr(function, name)
        for name in (
            "_run_pipeline",
            "_is_compile_placeholder",
            "_has_live_device_argument",
            "_artifact_cache_key",
            "_build_call_spec",
            "_call_state_from_spec",
        )
    }

    @functools.wraps(originals["_run_pipeline"])
    def run_pipeline(module: Any, fragments: list[str], **kwargs: Any) -> Any:
        if active() is not None:
            fragments = [
                "gpu-module-to-binary{format=isa}" if part.strip().startswith("gpu-module-to-binary") else part
                for part in fragments
            ]
        return originals["_run_pipeline"](module, fragments, **kwargs)

    @functools.wraps(originals["_is_compile_placeholder"])
    def is_placeholder(value: Any, **kwargs: Any) -> bool:
        receiver = active()
        if receiver is None or not hasattr(value, "torch_tensor"):
            return bool(originals["_is_compile_placeholder"](value, **kwargs))
        return not receiver.launching or value.torch_tensor.device.type == "meta"

    @functools.wraps(originals["_has_live_device_argument"])
    def has_live_argument(value: Any) -> bool:
        if active() is not None and hasattr(value, "torch_tensor"):
            return value.torch_tensor.device.type != "meta"
        return bool(originals["_has_live_device_argument"](value))

    @functools.wraps(originals["_artifact_cache_key"])
    def cache_key(*args: Any, **kwargs: Any) -> str:
        key = str(originals["_artifact_cache_key"](*args, **kwargs))
        return f"{key}-isa" if active() is not None else key

    @functools.wraps(originals["_build_call_spec"])
    def build_call_spec(sig: Any, args_tuple: tuple[Any, ...]) -> Any:
        spec = _NamedSpec(originals["_build_call_spec"](sig, args_tuple))
        spec.names = tuple(sig.parameters)
        return spec

    @functools.wraps(originals["_call_state_from_spec"])
    def call_state(call_spec: Any, artifact: Any) -> Any:
        state = originals["_call_state_from_spec"](call_spec, artifact)
        return _EmulatedCall(state, getattr(call_spec, "names", ())) if holds_isa(artifact) else state

    compile_or_execute = function.JitFunction._compile_or_execute

    @functools.wraps(compile_or_execute)
    def one_at_a_time(self: Any, *args: Any, **kwargs: Any) -> Any:
        if active() is None:
            return compile_or_execute(self, *args, **kwargs)
        with _lock:
            return compile_or_execute(self, *args, **kwargs)

    ensure_cache_manager = function.JitFunction._ensure_cache_manager

    @functools.wraps(ensure_cache_manager)
    def own_cache_manager(self: Any) -> None:
        receiver = active()
        if receiver is None:
            ensure_cache_manager(self)
            return
        directory = receiver.cache_dir
        self.cache_manager = None if directory is None else function.JitCacheManager(directory / self.func.__name__)

    function._run_pipeline = run_pipeline
    function._is_compile_placeholder = is_placeholder
    function._has_live_device_argument = has_live_argument
    function._artifact_cache_key = cache_key
    function._build_call_spec = build_call_spec
    function._call_state_from_spec = call_state
    function.JitFunction._ensure_cache_manager = own_cache_manager
    function.JitFunction._compile_or_execute = one_at_a_time


class _EmulatedCall:
    """A launcher's dispatch whose kernel launches go to the active receiver."""

    def __init__(self, state: Any, names: tuple[str, ...]) -> None:
        self.state = state
        self.names = names

    def __call__(self, args_tuple: tuple[Any, ...]) -> Any:
        receiver = active()
        if receiver is None:
            raise RuntimeError("this function was compiled for the emulator: call it inside `with emulated():`")
        names = self.names or tuple(f"argument {k}" for k in range(len(args_tuple)))
        found = [pair for name, value in zip(names, args_tuple, strict=False) for pair in tensors_of(value, name)]
        receiver.begin_call(found)
        try:
            return self.state(args_tuple)
        finally:
            receiver.end_call()


def _replace_executor() -> None:
    executor: Any = importlib.import_module("flydsl.compiler.jit_executor")
    engine_class, module_class = executor.ExecutionEngine, executor.GpuJitModule
    resolve, ensure_engine = executor._resolve_runtime_libs, executor.CompiledArtifact._ensure_engine

    def building() -> bool:
        return bool(getattr(_local, "building", False))

    class Engine(engine_class):  # type: ignore[misc, valid-type]
        """An engine; where the artifact holds ISA text, its host code calls our callbacks."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            if building():
                for name, callback in _callbacks.items():
                    self.raw_register_runtime(name, ctypes.cast(callback, ctypes.c_void_p))

    class Module(module_class):  # type: ignore[misc, valid-type]
        """Owner of loaded modules; where they hold ISA text, there is no GPU runtime to unload them from."""

        def __init__(self, engine: Any, modules: list[int]) -> None:
            self.emulated = building()
            if self.emulated:
                self.engine, self.modules = engine, modules
            else:
                super().__init__(engine, modules)

        def unload(self) -> None:
            """Unload what the GPU runtime loaded."""
            if not self.emulated:
                super().unload()

    @functools.wraps(resolve)
    def runtime_libs() -> list[str]:
        return [] if building() else resolve()

    @functools.wraps(ensure_engine)
    def ensure(self: Any) -> None:
        _local.building = holds_isa(self)
        try:
            ensure_engine(self)
        finally:
            _local.building = False

    executor.ExecutionEngine = Engine
    executor.GpuJitModule = Module
    executor._resolve_runtime_libs = runtime_libs
    executor.CompiledArtifact._ensure_engine = ensure
