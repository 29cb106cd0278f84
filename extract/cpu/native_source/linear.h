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

// Part `part` of `parts` of a block's weights on their way from memory: the hardware does not foresee the next block.
template <int COLS> static inline void fetch(const char *b, int groups, int part, int parts) {
    constexpr int bytes = COLS / LANES * SQUARE_BYTES;
    const int steps = groups / STEP_GROUPS, lines = steps * (bytes / 64);
    for (int line = lines * part / parts; line < lines * (part + 1) / parts; line++)
        __builtin_prefetch(b + (size_t)(line / (bytes / 64)) * PANEL_STEP_BYTES + line % (bytes / 64) * 64, 0, 2);
}

// For every block of the product: after(first row, rows, first column, block), a block row is Tile::cols floats.
template <class Tile, bool INTEGERS, class After>
static inline void multiply(const Left &a, int n, const Right &w, After &&after) {
    alignas(64) float block[MOST_ROWS * PANEL];
    const int parts = (n + Tile::rows - 1) / Tile::rows;
    for (int column = 0; column < w.columns; column += Tile::cols) {
        const char *b = w.panels + place(column, 0, w.groups);
        const char *next = w.panels + place(column + Tile::cols, 0, w.groups);
        const bool more = column + Tile::cols < w.columns;
        for (int row = 0; row < n; row += Tile::rows) {
            const int count = n - row < Tile::rows ? n - row : Tile::rows;
            if (more) fetch<Tile::cols>(next, w.groups, row / Tile::rows, parts);
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

static inline Floats activate(int kind, Floats g) {
    if (kind == SILU) return g / (exponential(-g) + 1.f);
    if (kind == GELU_TANH) {
        Floats z = (g + g * g * g * 0.044715f) * 0.7978845608028654f;  // tanh(z) = 1 - 2 / (e^2z + 1)
        return g * (1.f - 1.f / (exponential(z * 2.f) + 1.f));
    }
    for (int i = 0; i < LANES; i++) g[i] = 0.5f * g[i] * (1.f + std::erf(g[i] * 0.70710678118654752f));
    return g;
}
