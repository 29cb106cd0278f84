// The functions that Python calls (extract/cpu/native.py): one micro-batch, one thread, plain pointers, nothing allocated
// but what attention keeps for its thread. Every row's result depends on that row alone, bit for bit.
#include "attention.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Bit 0: bfloat16, bit 1: int8, bit 2: both through AMX.
EXPORT int extract_capabilities() {
    int found = amx_allowed() ? 7 : 0;
#if defined(__AVX512BF16__)
    found |= 1;
#endif
#if defined(__AVX512VNNI__)
    found |= 2;
#endif
    return found;
}

enum SourceType { FROM_FLOAT32 = 0, FROM_BFLOAT16 = 1, FROM_FLOAT16 = 2 };

static inline float half_to_float(uint16_t bits) {
    const uint32_t sign = (uint32_t)(bits & 0x8000) << 16, exponent = (bits >> 10) & 31, fraction = bits & 0x3ff;
    float v;
    uint32_t word;
    if (exponent == 0) {
        v = (float)fraction * 5.9604644775390625e-08f;  // 2^-24
        memcpy(&word, &v, 4);
        word |= sign;
    } else {
        word = sign | ((exponent == 31 ? 255u : exponent + 112u) << 23) | (fraction << 13);
    }
    memcpy(&v, &word, 4);
    return v;
}
static void read_row(int type, const void *source, size_t at, int count, float *v) {
    int k = 0;
    if (type == FROM_FLOAT32) memcpy(v, (const float *)source + at, count * sizeof(float));
    else if (type == FROM_BFLOAT16) {
        const uint16_t *p = (const uint16_t *)source + at;
        for (; k + LANES <= count; k += LANES) store(v + k, load_bf16(p + k));
        for (; k < count; k++) v[k] = float_of(p[k]);
    } else
        for (; k < count; k++) v[k] = half_to_float(((const uint16_t *)source)[at + k]);
}

// Rows of weights [rows, width] -> columns of panels. spread 0: column first + row; 1, 2: the gate and up halves of a
// gated MLP, 16 of each by turns from column 2 * first on.
EXPORT void extract_pack(int precision, int type, const void *source, int rows, int width, int padded, char *panels, int first,
                         int spread, float *scale, int32_t *offset) {
    const int per = 4 / bytes_of(precision), groups = padded / per;
    Buffer floats, words;
    float *v = floats.of<float>((size_t)LANES * padded);
    char *line = words.of<char>((size_t)LANES * padded * 4);
    for (int r0 = 0; r0 < rows; r0 += LANES) {
        const int count = rows - r0 < LANES ? rows - r0 : LANES;
        const int column = spread == 0 ? first + r0 : (first + r0) * 2 + (spread == 2 ? LANES : 0);
        for (int r = 0; r < count; r++) {
            float *row = v + (size_t)r * padded;
            read_row(type, source, (size_t)(r0 + r) * width, width, row);
            char *to = line + (size_t)r * padded * bytes_of(precision);
            if (precision != INT8) put_row(precision, row, width, to, nullptr, padded);
            else {
                float s;
                put_int8(row, width, to, &s, padded, true);
                int32_t sum = 0;
                for (int k = 0; k < padded; k++) {
                    const int q = (int)(uint8_t)to[k] - 128;
                    sum += q;
                    to[k] = (char)(int8_t)q;
                }
                scale[column + r] = s / (float)(PANEL * power_of_two(padded / PANEL));  // the gain of rotating both sides
                offset[column + r] = -128 * sum;
            }
        }
        const size_t bytes = (size_t)padded * bytes_of(precision);
        for (int g = 0; g < groups; g++)
            for (int r = 0; r < count; r++) memcpy(panels + place(column + r, g, groups), line + r * bytes + (size_t)g * 4, 4);
    }
}

EXPORT void extract_embed(int type, const void *table, int width, const int32_t *ids, int n, float scale, float *x) {
    for (int i = 0; i < n; i++) {
        float *row = x + (size_t)i * width;
        read_row(type, table, (size_t)ids[i] * width, width, row);
        if (scale != 1.f)
            for (int k = 0; k < width; k++) row[k] *= scale;
    }
}

// weight null: only the conversion.
EXPORT void extract_norm(int precision, const float *x, int width, int n, const float *weight, float eps, char *out, size_t stride,
                         float *scale, int padded) {
    static thread_local Buffer buffer;
    float *v = buffer.of<float>(padded);
    for (int i = 0; i < n; i++) {
        const float *row = x + (size_t)i * width;
        memcpy(v, row, width * sizeof(float));
        if (weight) scale_by(v, width, inverse_rms(row, width, eps), weight);
        put_row(precision, v, width, out + i * stride, scale + i, padded);
    }
}

EXPORT void extract_final_norm(const float *x, int width, int n, const float *weight, float eps, float *out) {
    for (int i = 0; i < n; i++) {
        const float *row = x + (size_t)i * width;
        float *to = out + (size_t)i * width;
        memcpy(to, row, width * sizeof(float));
        scale_by(to, width, inverse_rms(row, width, eps), weight);
    }
}

EXPORT void extract_add_norm(const float *branch, size_t stride, int width, int n, const float *weight, float eps, float scale, float *x) {
    static thread_local Buffer buffer;
    float *v = buffer.of<float>(width);
    for (int i = 0; i < n; i++) {
        const float *row = branch + i * stride;
        float *to = x + (size_t)i * width;
        memcpy(v, row, width * sizeof(float));
        scale_by(v, width, inverse_rms(row, width, eps), weight);
        for (int k = 0; k < width; k++) to[k] += scale * v[k];
    }
}

// out: rows of `stride` values, floats or bfloat16 bits.
EXPORT void extract_project(int precision, const char *a, size_t a_stride, const float *a_scale, int n, const char *panels,
                            const float *scale, const int32_t *offset, const float *bias, int groups, int packed, int outputs, int bf16,
                            char *out, size_t stride) {
    const Left left{a, a_stride, a_scale};
    const Right right{panels, scale, offset, bias, groups, packed};
    with_tile(precision, [&](auto tile, auto integers) {
        using Tile = decltype(tile);
        multiply<Tile, decltype(integers)::value>(left, n, right, [&](int row, int count, int column, const float *block) {
            for (int i = 0; i < count; i++)
                for (int j = 0; j < Tile::cols && column + j < outputs; j += LANES) {
                    const Floats v = load(block + i * Tile::cols + j);
                    const size_t at = (size_t)(row + i) * stride + column + j;
                    const int left_over = outputs - column - j;
                    if (left_over >= LANES) {
                        if (bf16) store_bf16((uint16_t *)out + at, v);
                        else store((float *)out + at, v);
                    } else if (bf16) store_bf16_part((uint16_t *)out + at, v, left_over);
                    else store_part((float *)out + at, v, left_over);
                }
        });
    });
}

EXPORT void extract_project_add(int precision, const char *a, size_t a_stride, const float *a_scale, int n, const char *panels,
                                const float *scale, const int32_t *offset, const float *bias, int groups, int packed, int outputs,
                                float factor, float *x) {
    const Left left{a, a_stride, a_scale};
    const Right right{panels, scale, offset, bias, groups, packed};
    with_tile(precision, [&](auto tile, auto integers) {
        using Tile = decltype(tile);
        multiply<Tile, decltype(integers)::value>(left, n, right, [&](int row, int count, int column, const float *block) {
            for (int i = 0; i < count; i++)
                for (int j = 0; j < Tile::cols && column + j < outputs; j += LANES) {
                    float *to = x + (size_t)(row + i) * outputs + column + j;
                    const Floats v = load(block + i * Tile::cols + j) * factor;
                    const int left_over = outputs - column - j;
                    if (left_over >= LANES) store(to, load(to) + v);
                    else store_part(to, load_part(to, left_over) + v, left_over);
                }
        });
    });
}

// `outputs` is the width of the MLP. What is written is of the precision `to_type`, which may be another than that of the
// product; int8 needs whole rows of floats (`rows`, `row_stride` floats each) before it rounds. Narrow tiles write floats.
EXPORT void extract_project_gated(int precision, const char *a, size_t a_stride, const float *a_scale, int n, const char *panels,
                                  const float *scale, const int32_t *offset, const float *bias, int groups, int packed, int outputs,
                                  int activation, int to_type, char *out, size_t stride, float *out_scale, int padded, float *rows,
                                  size_t row_stride) {
    const Left left{a, a_stride, a_scale};
    const Right right{panels, scale, offset, bias, groups, packed};
    with_tile(precision, [&](auto tile, auto integers) {
        using Tile = decltype(tile);
        constexpr int both = 2 * LANES;
        constexpr bool FULL = std::is_same<Tile, Float32Tile>::value;
        multiply<Tile, decltype(integers)::value>(left, n, right, [&](int row, int count, int column, float *block) {
            if constexpr (Tile::cols >= both) {
                for (int j = 0; j < Tile::cols && (column + j) / 2 < outputs; j += both) {
                    const int at = (column + j) / 2, left_over = outputs - at < LANES ? outputs - at : LANES;
                    for (int i = 0; i < count; i++) {
                        const float *pair = block + i * Tile::cols + j;
                        const Floats v = activate<!FULL>(activation, load(pair)) * load(pair + LANES);
                        char *to = out + (row + i) * stride;
                        if (to_type == INT8) store_part(rows + (row + i) * row_stride + at, v, left_over);
                        else if (to_type == BFLOAT16) store_bf16_part((uint16_t *)to + at, v, left_over);
                        else store_part((float *)to + at, v, left_over);
                    }
                }
            } else {  // narrow tiles: the gate comes first, the up columns finish it
                const int at = column / both * LANES, left_over = outputs - at < LANES ? outputs - at : LANES;
                for (int i = 0; i < count && left_over > 0; i++) {
                    float *to = (float *)(out + (row + i) * stride) + at;
                    const Floats v = load(block + i * Tile::cols);
                    store_part(to, column % both == 0 ? activate<false>(activation, v) : load_part(to, left_over) * v, left_over);
                }
            }
        });
    });
    if (to_type == INT8)
        for (int i = 0; i < n; i++) put_row(INT8, rows + i * row_stride, outputs, out + i * stride, out_scale + i, padded);
}

EXPORT void extract_prepare_heads(int bf16, char *heads, size_t stride, int column, int n, int num_heads, int dim, const float *weight,
                                  float eps, int over_projection, const int32_t *positions, const float *cosine, const float *sine, int half) {
    static thread_local Buffer buffer;
    const int width = num_heads * dim;
    float *v = buffer.of<float>(width);
    for (int i = 0; i < n; i++) {
        char *row = heads + i * stride;
        read_heads(row, bf16, column, width, v);
        if (weight && over_projection) scale_by(v, width, inverse_rms(v, width, eps), weight);
        for (int h = 0; h < num_heads; h++) {
            float *head = v + h * dim;
            if (weight && !over_projection) scale_by(head, dim, inverse_rms(head, dim, eps), weight);
            if (cosine) rotate(head, half, cosine + (size_t)positions[i] * half, sine + (size_t)positions[i] * half);
        }
        write_heads(row, bf16, column, width, v);
    }
}

EXPORT void extract_attend(int precision, int bf16, const char *queries, size_t query_stride, const char *local, size_t local_stride,
                           int column, const char *kept, size_t kept_stride, int num_sequences, const int32_t *query_start,
                           const int32_t *query_count, const int32_t *cu_keys, const int32_t *key_index, int num_kept, int num_heads,
                           int num_kv, int dim, float scale, float softcap, int window, char *out, size_t stride, float *out_scale,
                           int padded, float *rows, size_t row_stride) {
    const Attention task{(bool)bf16, queries, query_stride, local, local_stride, column, kept, kept_stride, num_sequences,
                         query_start, query_count, cu_keys, key_index, num_kept, num_heads, num_kv, dim, window, scale, softcap};
    auto write = [&](int row, int at, Floats v, int count) {
        if (precision == INT8) store_part(rows + row * row_stride + at, v, count);
        else if (precision == BFLOAT16) store_bf16_part((uint16_t *)(out + row * stride) + at, v, count);
        else store_part((float *)(out + row * stride) + at, v, count);
    };
    with_tile(bf16 ? BFLOAT16 : FLOAT32, [&](auto tile, auto) { attend<decltype(tile)>(task, write); });
    if (precision == INT8)
        for (int s = 0; s < num_sequences; s++)
            for (int i = query_start[s]; i < query_start[s] + query_count[s]; i++)
                put_row(INT8, rows + i * row_stride, num_heads * dim, out + i * stride, out_scale + i, padded);
}
