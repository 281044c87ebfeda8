// What the Python side may call. Plain C names, no exceptions across the border.
#pragma once
#include <cstdint>
#define SLIPSTREAM_API extern "C" __attribute__((visibility("default")))
