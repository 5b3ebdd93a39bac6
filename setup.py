"""Names of the wheel's packages: `nsinit`, `runner` and `egress` ship as `sandkasten_nsinit` and so on.

The rest of the build is in pyproject.toml. An editable installation keeps the names of the tree. See
docs/adr/0016-names-in-the-wheel.md.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

PREFIX = "sandkasten_"
IMPORT = re.compile(r"^(\s*(?:from|import) )(nsinit|runner|egress)\b", re.MULTILINE)


class BuildPy(build_py):  # type: ignore[misc]
    def run(self) -> None:
        if not self.editable_mode:
            shutil.rmtree(self.build_lib, ignore_errors=True)  # modules that are gone would be shipped
        super().run()

    def get_module_outfile(self, build_dir: str, package: list[str], module: str) -> str:
        if not self.editable_mode and package[0] in ("nsinit", "runner", "egress"):
            package = [PREFIX + package[0], *package[1:]]
        return super().get_module_outfile(build_dir, package, module)

    def build_module(self, module: str, module_file: str, package: list[str]) -> Any:
        outfile, copied = super().build_module(module, module_file, package)
        if not self.editable_mode:
            path = Path(outfile)
            path.write_text(IMPORT.sub(rf"\1{PREFIX}\2", path.read_text(encoding="utf-8")), encoding="utf-8")
        return outfile, copied


class EggInfo(egg_info):  # type: ignore[misc]
    def run(self) -> None:
        super().run()
        if self.distribution.get_command_obj("editable_wheel", create=False) is None:
            names = Path(self.egg_info, "top_level.txt")
            names.write_text(f"sandkasten\n{PREFIX}nsinit\n{PREFIX}runner\n{PREFIX}egress\n")


setup(cmdclass={"build_py": BuildPy, "egg_info": EggInfo})
