"""Describes the package. ``pyproject.toml`` holds the settings of the tools alone."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import find_packages, setup

# TensorFlow comes as `tensorflow` or as `tensorflow-cpu`, and pip knows of no "one of these": a
# requirement on one would make it download the other's twin. So neither is required here; both
# are extras, and tflms/installed.py says what to do where TensorFlow is missing.
TENSORFLOW = ">=2.21"

HERE = Path(__file__).resolve().parent
SOURCE = (HERE / "tflms" / "__init__.py").read_text(encoding="utf-8")
VERSION = re.findall(r'^__version__ = "(.+)"$', SOURCE, flags=re.MULTILINE)

setup(
    name="tflms",
    version=VERSION[0],
    description=(
        "Train TensorFlow models that do not fit in the accelerator's memory, "
        "with the same numbers."
    ),
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    keywords="tensorflow keras memory swapping checkpointing recomputation large-model",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    install_requires=["numpy>=2", "networkx>=3.4", "rich>=13"],
    extras_require={
        "tensorflow": [f"tensorflow{TENSORFLOW}"],
        "cpu": [f"tensorflow-cpu{TENSORFLOW}"],
        "plot": ["matplotlib>=3.8"],
        "examples": ["nibabel>=5", "nilearn>=0.11", "matplotlib>=3.8"],
        "docs": ["sphinx>=8", "myst-parser>=4", "furo"],
        "dev": ["pytest>=8", "hypothesis>=6", "ruff>=0.9", "mypy>=1.11", "setuptools>=68", "wheel"],
    },
    packages=[*find_packages(include=["tflms", "tflms.*"]), "tflms._rules"],
    # The rules lie beside the package in a checkout and inside it in a wheel. An editable install
    # does not follow this mapping, so the loader looks in both places.
    package_dir={"tflms": "tflms", "tflms._rules": "rules"},
    package_data={
        "tflms": ["py.typed"],
        "tflms.emulator": ["*.cc", "*.h"],
        "tflms._rules": ["*.toml", "*.md"],
    },
    zip_safe=False,  # the compiler reads the emulator's sources
)
