// What happens to one row between two linears: norms, the conversion to a left side, rotary positions.
#pragma once
#include "tiles.h"

static inline float inverse_rms(const float *v, int width, float eps) {
    Floats sum{};
    int k = 0;
    for (; k + LANES <= width; k += LANES) { Floats t = load(v + k); sum += t * t; }
    if (k < width) { Floats t = load_part(v + k, width - k); sum += t * t; }
    return 1.f / std::sqrt(sum_of(sum) / (float)width + eps);
}

// Unnormalised Walsh-Hadamard transform of 64 floats, strides 1, 2, 4 ... 32.
static inline void hadamard(float *v) {
    Floats r[4];
    for (int j = 0; j < 4; j++) r[j] = load(v + j * LANES);
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (int stride = 1; stride < LANES; stride *= 2) {
        Ints partner = lane ^ stride;
        Words sign = (Words)(((lane & stride) != 0) & (Ints)(Words{} + 0x80000000u));
        for (int j = 0; j < 4; j++) r[j] = __builtin_shuffle(r[j], partner) + (Floats)((Words)r[j] ^ sign);
    }
    Floats a = r[0] + r[1], b = r[0] - r[1], c = r[2] + r[3], d = r[2] - r[3];
    store(v, a + c); store(v + 16, b + d); store(v + 32, a - c); store(v + 48, b - d);
}

constexpr int MOST_ODD = 15;

// Orthonormal DCT-II of each odd size; see extract/cpu/rotation.py.
struct Mixers {
    float of[MOST_ODD + 1][MOST_ODD][MOST_ODD] = {};
    Mixers() {
        for (int size = 1; size <= MOST_ODD; size += 2)
            for (int k = 0; k < size; k++)
                for (int i = 0; i < size; i++)
                    of[size][k][i] = (float)(std::sqrt((k == 0 ? 1. : 2.) / size) * std::cos(3.14159265358979323846 * (i + 0.5) * k / size));
    }
};
static const Mixers mixers;

static inline int power_of_two(int blocks) { return blocks & -blocks; }

// Mix the blocks of a row, position by position: butterflies over the power of two in their number, then the odd factor.
static inline void mix(float *v, int blocks) {
    const int even = power_of_two(blocks), odd = blocks / even;
    for (int stride = 1; stride < even; stride *= 2)
        for (int block = 0; block < blocks; block++)
            if (!(block & stride))
                for (int j = 0; j < PANEL; j += LANES) {
                    float *first = v + block * PANEL + j, *second = first + stride * PANEL;
                    const Floats a = load(first), b = load(second);
                    store(first, a + b);
                    store(second, a - b);
                }
    if (odd == 1 || odd > MOST_ODD) return;
    for (int block = 0; block < even; block++)
        for (int j = 0; j < PANEL; j += LANES) {
            Floats rows[MOST_ODD];
            for (int i = 0; i < odd; i++) rows[i] = load(v + (i * even + block) * PANEL + j);
            for (int k = 0; k < odd; k++) {
                Floats sum{};
                for (int i = 0; i < odd; i++) sum += rows[i] * mixers.of[odd][k][i];
                store(v + (k * even + block) * PANEL + j, sum);
            }
        }
}

// One row of `width` floats -> bytes with zero point 128, rotated (in `v`), padded with zeros to `padded`.
// Scaled by its largest magnitude, or by 1e-30 if that is more; a row that is not finite gets the scale NaN. Weights are
// divided by the scale, other rows multiplied by its inverse: bit for bit what the portable kernels do.
static inline void put_int8(float *v, int width, char *out, float *scale, int padded, bool weights) {
    memset(v + width, 0, (padded - width) * sizeof(float));
    for (int k = 0; k < padded; k += PANEL) hadamard(v + k);
    mix(v, padded / PANEL);
    Floats most{}, bad{};
    for (int k = 0; k < padded; k += LANES) {
        Floats t = load(v + k);
        most = larger(most, magnitude(t));
        bad += t * 0.f;
    }
    float top = max_of(most);
    top = top > 1e-30f ? top : 1e-30f;
    const float per = top / 127.f, inverse = 127.f / top;
    *scale = per + sum_of(bad);
    for (int k = 0; k < padded; k += LANES) {
        const Floats scaled = weights ? load(v + k) / per : load(v + k) * inverse;
#if defined(__AVX512F__)
        __m512i q = _mm512_add_epi32(_mm512_cvtps_epi32((__m512)scaled), _mm512_set1_epi32(128));
        _mm_storeu_si128((__m128i *)(out + k), _mm512_cvtepi32_epi8(q));
#else
        Ints q = __builtin_convertvector(nearest(scaled), Ints) + 128;
        Bytes bytes = __builtin_convertvector(q, Bytes);
        memcpy(out + k, &bytes, sizeof bytes);
#endif
    }
}

// One row of `width` floats -> the left side's type, padded with zeros to `padded` values. Changes `v` where it rotates.
static inline void put_row(int precision, float *v, int width, char *out, float *scale, int padded) {
    if (precision == FLOAT32) {
        memcpy(out, v, width * sizeof(float));
        memset(out + width * sizeof(float), 0, (padded - width) * sizeof(float));
    } else if (precision == BFLOAT16) {
        uint16_t *to = (uint16_t *)out;
        int k = 0;
        for (; k + LANES <= width; k += LANES) store_bf16(to + k, load(v + k));
        if (k < width) store_bf16_part(to + k, load_part(v + k, width - k), width - k);
        memset(to + width, 0, (padded - width) * sizeof(uint16_t));
    } else
        put_int8(v, width, out, scale, padded, false);
}

// Heads are floats or bfloat16 bits.
static inline Floats load_heads(const char *row, bool bf16, int k) {
    return bf16 ? load_bf16((const uint16_t *)row + k) : load((const float *)row + k);
}
static inline float head_value(const char *row, bool bf16, int k) {
    return bf16 ? float_of(((const uint16_t *)row)[k]) : ((const float *)row)[k];
}
static inline void read_heads(const char *row, bool bf16, int column, int width, float *v) {
    int k = 0;
    for (; k + LANES <= width; k += LANES) store(v + k, load_heads(row, bf16, column + k));
    for (; k < width; k++) v[k] = head_value(row, bf16, column + k);
}
static inline void write_heads(char *row, bool bf16, int column, int width, const float *v) {
    int k = 0;
    for (; k + LANES <= width; k += LANES) {
        if (bf16) store_bf16((uint16_t *)row + column + k, load(v + k));
        else store((float *)row + column + k, load(v + k));
    }
    if (k < width) {
        if (bf16) store_bf16_part((uint16_t *)row + column + k, load_part(v + k, width - k), width - k);
        else store_part((float *)row + column + k, load_part(v + k, width - k), width - k);
    }
}
static inline void scale_by(float *v, int width, float factor, const float *weight) {
    int k = 0;
    for (; k + LANES <= width; k += LANES) store(v + k, load(v + k) * factor * load(weight + k));
    for (; k < width; k++) v[k] = v[k] * factor * weight[k];
}
// Channels k and k + half of the first 2 * half are one pair.
static inline void rotate(float *v, int half, const float *cosine, const float *sine) {
    int k = 0;
    for (; k + LANES <= half; k += LANES) {
        Floats a = load(v + k), b = load(v + half + k), c = load(cosine + k), s = load(sine + k);
        store(v + k, a * c - b * s);
        store(v + half + k, b * c + a * s);
    }
    for (; k < half; k++) {
        float a = v[k], b = v[half + k];
        v[k] = a * cosine[k] - b * sine[k];
        v[half + k] = b * cosine[k] + a * sine[k];
    }
}
