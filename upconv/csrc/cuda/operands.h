// Which types of operands the kernels on tensor cores have here: UPCONV_OPERAND_BITS, a bit for
// each number of a launch file's list. The GPU's libraries have some each (upconv/libraries.py),
// tests all.
#pragma once

#ifndef UPCONV_OPERAND_BITS
#define UPCONV_OPERAND_BITS 15
#endif

namespace upconv {

// What stands under `if constexpr (is_here(number))` is compiled where its type is.
constexpr bool is_here(int operand) { return UPCONV_OPERAND_BITS >> operand & 1; }

}  // namespace upconv
