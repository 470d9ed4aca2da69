// Which types of operands the kernels on tensor cores have in this library: UPCONV_OPERAND_BITS, a
// bit for each number of a launch file's list (upconv/libraries.py). Tests have all of them.
#pragma once

#ifndef UPCONV_OPERAND_BITS
#define UPCONV_OPERAND_BITS 15
#endif

namespace upconv {

// What stands under `if constexpr (is_here(number))` is compiled where its type is.
constexpr bool is_here(int operand) { return UPCONV_OPERAND_BITS >> operand & 1; }

}  // namespace upconv
