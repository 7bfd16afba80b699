# SPDX-License-Identifier: MIT
# A recipe for the checkout that it lies in: conan create packaging/conan
import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain
from conan.tools.files import copy, rmdir

ROOT = os.path.join("..", "..")


class KvqRecipe(ConanFile):
    name = "kvq"
    license = "MIT"
    description = "Key/value caches of transformers in 2 to 8 bits, and attention on the packed codes"
    topics = ("quantization", "kv-cache", "transformer", "attention", "header-only")
    settings = "os", "arch", "compiler", "build_type"
    options = {
        "library": [True, False],  # kvq::library: formats by name, and kvq.h
        "shared": [True, False],
        "with_xsimd": [True, False],
        "with_eigen": [True, False],
        "with_json": [True, False],
    }
    default_options = {"library": False, "shared": False, "with_xsimd": True, "with_eigen": False, "with_json": False}

    def set_version(self):
        with open(os.path.join(self.recipe_folder, ROOT, "include", "kvq", "version.hpp"), encoding="utf-8") as header:
            self.version = ".".join(re.findall(r"#define KVQ_VERSION_\w+ (\d+)", header.read()))

    def export_sources(self):
        root = os.path.join(self.recipe_folder, ROOT)
        for pattern in ("CMakeLists.txt", "LICENSE", "cmake/*", "include/*", "src/*"):
            copy(self, pattern, root, self.export_sources_folder)

    def configure(self):
        if not self.options.library:
            self.options.rm_safe("shared")

    def validate(self):
        check_min_cppstd(self, 20)

    def requirements(self):
        if self.options.with_xsimd:
            self.requires("xsimd/[>=8.1]", transitive_headers=True)
        if self.options.with_eigen:
            self.requires("eigen/[>=3.4]", transitive_headers=True)
        if self.options.with_json:
            self.requires("nlohmann_json/[>=3.11]", transitive_headers=True)

    def package_id(self):
        if not self.info.options.library:
            self.info.clear()

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        for name in ("TESTS", "EXAMPLES", "BENCH"):
            toolchain.cache_variables[f"KVQ_{name}"] = False
        toolchain.cache_variables["KVQ_LIBRARY"] = bool(self.options.library)
        toolchain.generate()

    def build(self):
        cmake = CMake(self)
        cmake.configure()
        cmake.build()

    def package(self):
        CMake(self).install()
        copy(self, "LICENSE", self.source_folder, os.path.join(self.package_folder, "licenses"))
        rmdir(self, os.path.join(self.package_folder, "share", "doc"))

    def package_info(self):
        # The package's own CMake files, which define kvq::kvq, kvq::simd and so on.
        self.cpp_info.set_property("cmake_find_mode", "none")
        self.cpp_info.builddirs = [os.path.join("share", "cmake", "kvq")]
        self.cpp_info.bindirs = []
        if self.options.library:
            self.cpp_info.libs = ["kvq"]
            self.cpp_info.defines = ["KVQ_COMPILED"]
        else:
            self.cpp_info.libdirs = []
