// SPDX-License-Identifier: MIT
// Included behind the headers of the standard library and of third parties, which use some of these names
// themselves, and in front of every header of kvq: what Qt and <windows.h> define.
#pragma once

#define slots
#define signals public
#define emit
#define foreach 0_is_a_macro_elsewhere
#define forever 0_is_a_macro_elsewhere
#define min(a, b) 0_is_a_macro_elsewhere
#define max(a, b) 0_is_a_macro_elsewhere
