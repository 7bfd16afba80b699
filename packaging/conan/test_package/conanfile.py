# SPDX-License-Identifier: MIT
# Builds and runs tests/consume against the package.
import os

from conan import ConanFile
from conan.tools.build import can_run
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain


class KvqTest(ConanFile):
    settings = "os", "arch", "compiler", "build_type"

    def requirements(self):
        self.requires(self.tested_reference_str)

    def layout(self):
        self.folders.generators = self.folders.build = os.path.join("build", str(self.settings.build_type))

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        toolchain.cache_variables["WANTED_VERSION"] = str(self.dependencies["kvq"].ref.version)
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure(build_script_folder=os.path.join(self.recipe_folder, "..", "..", "..", "tests", "consume", "cmake"))
        cmake.build()

    def test(self):
        if can_run(self):
            self.run("ctest --output-on-failure --no-tests=error", env="conanrun")
