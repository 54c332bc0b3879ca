"""Builds the compiled functions, where a C compiler is; all else is in pyproject.toml.

They use nothing of Python, so one library serves all its versions; a build without a compiler, or
with ``DPOPTIM_NATIVE=0`` in the environment, makes the same package without it.
"""

import os
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

COMPILED = runpy.run_path("src/dpoptim/runtime/compiled.py")
LIBRARY = Extension(
    "dpoptim._compiled",
    sources=sorted(map(str, Path("src").rglob("*.c"))),
    depends=sorted(map(str, Path("src").rglob("*.h"))),
    define_macros=[("DPOPTIM_SOURCES", f'"{COMPILED["digest_of_sources"]()}"')],
    extra_compile_args=["-O3", "-fno-math-errno", "-Wno-psabi"],
    optional=True,
)


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # no module's initialisation


class AnyPython(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[] if os.environ.get("DPOPTIM_NATIVE") == "0" else [LIBRARY],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPython},
)
