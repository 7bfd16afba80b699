// SPDX-License-Identifier: MIT
// Included before a header under test: names that <complex.h>, <termios.h>, <sys/sysmacros.h>, <math.h> or
// the headers of Windows define as macros, and that a library therefore must not use.
#pragma once

#define I 0_is_a_macro_elsewhere
#define B0 0_is_a_macro_elsewhere
#define B50 0_is_a_macro_elsewhere
#define major 0_is_a_macro_elsewhere
#define minor 0_is_a_macro_elsewhere
#define small 0_is_a_macro_elsewhere
#define near 0_is_a_macro_elsewhere
#define far 0_is_a_macro_elsewhere
#define interface 0_is_a_macro_elsewhere
#define IN 0_is_a_macro_elsewhere
#define OUT 0_is_a_macro_elsewhere
#define ERROR 0_is_a_macro_elsewhere
#define DOMAIN 0_is_a_macro_elsewhere
#define OVERFLOW 0_is_a_macro_elsewhere
#define UNDERFLOW 0_is_a_macro_elsewhere
