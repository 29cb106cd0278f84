// Packed weights and the products with them; what follows a product happens while its block is in the nearest cache.
#pragma once
#include <type_traits>

#include "rows.h"

struct Left {
    const char *data;     // row-major, `stride` bytes a row
    size_t stride;
    const float *scale;   // int8: one a row
};
struct Right {
    const char *panels;
    const float *scale;       // int8: one a column
    const int32_t *offset;    // int8: -128 * sum of the column, takes the left zero point back out
    const float *bias;        // one a column, or null
    int groups;               // k-groups, a multiple of 16
    int columns;              // as packed, a multiple of 64
};

// int32 sums -> floats, in place.
static inline void dequantize(float *block, int ldc, int count, int cols, int first_row, int first_column, const Left &a, const Right &w) {
    for (int j = 0; j < cols; j += LANES) {
        Ints offset;
        memcpy(&offset, w.offset + first_column + j, sizeof offset);
        Floats scale = load(w.scale + first_column + j);
        for (int i = 0; i < count; i++) {
            Ints sum;
            memcpy(&sum, block + i * ldc + j, sizeof sum);
            store(block + i * ldc + j, __builtin_convertvector(sum + offset, Floats) * scale * a.scale[first_row + i]);
        }
    }
}

// For every block of the product: after(first row, rows, first column, block), a block row is Tile::cols floats.
template <class Tile, bool INTEGERS, class After>
static inline void multiply(const Left &a, int n, const Right &w, After &&after) {
    alignas(64) float block[MOST_ROWS * PANEL];
    for (int column = 0; column < w.columns; column += Tile::cols) {
        const char *b = w.panels + place(column, 0, w.groups);
        for (int row = 0; row < n; row += Tile::rows) {
            const int count = n - row < Tile::rows ? n - row : Tile::rows;
            Tile::run(a.data + row * a.stride, a.stride, b, w.groups, block, Tile::cols);
            if (INTEGERS) dequantize(block, Tile::cols, count, Tile::cols, row, column, a, w);
            if (w.bias)
                for (int j = 0; j < Tile::cols; j += LANES)
                    for (int i = 0; i < count; i++)
                        store(block + i * Tile::cols + j, load(block + i * Tile::cols + j) + load(w.bias + column + j));
            after(row, count, column, block);
        }
    }
}

template <class Body> static inline void with_tile(int precision, Body &&body) {
    switch (precision) {
    case FLOAT32: return body(Float32Tile{}, std::integral_constant<bool, false>{});
    case BFLOAT16:
#if HAS_AMX
        if (amx_allowed()) { AmxScope tiles; return body(AmxTile<false>{}, std::integral_constant<bool, false>{}); }
#endif
#if defined(__AVX512BF16__)
        return body(Bfloat16Tile{}, std::integral_constant<bool, false>{});
#endif
        return;
    case INT8:
#if HAS_AMX
        if (amx_allowed()) { AmxScope tiles; return body(AmxTile<true>{}, std::integral_constant<bool, true>{}); }
#endif
#if defined(__AVX512VNNI__)
        return body(Int8Tile{}, std::integral_constant<bool, true>{});
#endif
        return;
    }
}

enum Activation { SILU = 0, GELU_TANH = 1, GELU = 2 };

// g times the logistic function of z, to float32; ROUNDED: to 1e-5, for what becomes bfloat16 or int8 anyway.
template <bool ROUNDED> static inline Floats times_logistic(Floats g, Floats z) {
#if defined(__AVX512F__)
    if constexpr (ROUNDED) {
        const Floats power = rough_power_of_two(z * -1.44269504f) + 1.f;
        const Floats near = (Floats)_mm512_rcp14_ps((__m512)power);
        return g * (near * (2.f - power * near));
    }
#endif
    return g / (exponential(-z) + 1.f);
}

template <bool ROUNDED> static inline Floats activate(int kind, Floats g) {
    if (kind == SILU) return times_logistic<ROUNDED>(g, g);
    if (kind == GELU_TANH)  // (1 + tanh(u)) / 2 is the logistic function of 2 u
        return times_logistic<ROUNDED>(g, (g + g * g * g * 0.044715f) * 1.5957691216057308f);
    for (int i = 0; i < LANES; i++) g[i] = 0.5f * g[i] * (1.f + std::erf(g[i] * 0.70710678118654752f));
    return g;
}
