// SPDX-License-Identifier: MIT
// The only place where the version is written; CMake, Meson and pkg-config read it from here.
#pragma once

#define KVQ_VERSION_MAJOR 0
#define KVQ_VERSION_MINOR 3
#define KVQ_VERSION_PATCH 0
