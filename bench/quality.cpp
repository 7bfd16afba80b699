// Presets and published methods on real q, k and v: scripts/quality.
#include "quality.hpp"

int main(int argc, char** argv) { return quality::run_program(argc, argv, quality::all_formats()); }
