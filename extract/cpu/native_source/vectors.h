// Sixteen numbers at a time, in the compiler's own vector types: one register with AVX-512, two with AVX2, four with NEON.
// Loads and stores need no alignment. Nothing here assumes finite numbers: NaN and infinity come out as they went in.
#pragma once
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

constexpr int LANES = 16;
typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(16)));

static inline Floats splat(float v) { return v - Floats{}; }
static inline Floats load(const float *p) { Floats v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float *p, Floats v) { memcpy(p, &v, sizeof v); }

static inline float float_of(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float v;
    memcpy(&v, &word, sizeof v);
    return v;
}
static inline Floats load_bf16(const uint16_t *p) {
    Halves bits;
    memcpy(&bits, p, sizeof bits);
    return (Floats)(__builtin_convertvector(bits, Words) << 16);
}
// Round to nearest even; a NaN stays one.
static inline Halves to_bf16(Floats v) {
#if defined(__AVX512BF16__)
    return (Halves)_mm512_cvtneps_pbh((__m512)v);
#else
    Words bits = (Words)v;
    Words rounded = (bits + ((bits >> 16) & 1) + 0x7fff) >> 16;
    Words quiet = (bits >> 16) | 0x40;
    return __builtin_convertvector((v == v) ? rounded : quiet, Halves);
#endif
}
static inline void store_bf16(uint16_t *p, Floats v) { Halves bits = to_bf16(v); memcpy(p, &bits, sizeof bits); }

// The first `count` of sixteen: usually all, fewer in the last columns of a row.
static inline Floats load_part(const float *p, int count) {
    Floats v{};
    memcpy(&v, p, count * sizeof(float));
    return v;
}
static inline void store_part(float *p, Floats v, int count) {
    if (count == LANES) store(p, v);
    else memcpy(p, &v, count * sizeof(float));
}
static inline void store_bf16_part(uint16_t *p, Floats v, int count) {
    if (count == LANES) return store_bf16(p, v);
    Halves bits = to_bf16(v);
    memcpy(p, &bits, count * sizeof(uint16_t));
}

static inline float sum_of(Floats v) {
    float halves[LANES];
    memcpy(halves, &v, sizeof v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++) halves[i] += halves[i + width];
    return halves[0];
}
static inline float max_of(Floats v) {
    float most = v[0];
    for (int i = 1; i < LANES; i++) most = v[i] > most ? v[i] : most;
    return most;
}
static inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}
static inline Floats smaller(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_min_ps((__m512)a, (__m512)b);
#else
    return a < b ? a : b;
#endif
}
static inline Floats magnitude(Floats v) { return (Floats)((Words)v & 0x7fffffffu); }
// Nearest whole number, ties to even, for |v| < 2^22: the sum leaves no fraction bits.
static inline Floats nearest(Floats v) {
    const Floats shift = splat(12582912.f);
    Floats moved = v + shift;
#if defined(__GNUC__) && !defined(__clang__)
    asm("" : "+m"(moved));  // keep the compiler from undoing the sum
#endif
    return moved - shift;
}

// e^v to 1.2e-7 (Cephes' expf: reduction by ln 2 in two parts, then a polynomial of degree 5).
static inline Floats exponential(Floats v) {
    Floats x = larger(splat(-87.3365478515625f), smaller(splat(88.3762626647950f), v));  // a NaN comes out of both
#if defined(__AVX512F__)
    Floats n = (Floats)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), 0);
#else
    Floats n = nearest(x * 1.44269504088896341f);
#endif
    Floats r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    Floats p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + (r + 1.f);
#if defined(__AVX512F__)
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    Ints power = (__builtin_convertvector(n, Ints) + 127) << 23;
    return p * (Floats)power;
#endif
}

#if defined(__AVX512F__)
// 2^v to 4e-6 of itself: a polynomial of degree 4 for the fraction.
static inline Floats rough_power_of_two(Floats v) {
    Floats x = larger(splat(-126.f), smaller(splat(126.f), v));
    Floats n = (Floats)_mm512_roundscale_ps((__m512)x, 0), r = x - n;
    Floats p = splat(9.6181291e-3f);
    p = p * r + 5.5504109e-2f;
    p = p * r + 2.4022651e-1f;
    p = p * r + 6.9314718e-1f;
    return (Floats)_mm512_scalef_ps((__m512)(p * r + 1.f), (__m512)n);
}
#endif

// tanh to 2e-7 of itself: a Taylor polynomial where 1 - e^-2v would cancel.
static inline Floats hyperbolic_tangent(Floats v) {
    Floats s = v * v;
    Floats near = v + v * s * (-3.3333333e-1f + s * (1.3333333e-1f + s * (-5.3968254e-2f + s * 2.1869489e-2f)));
    Floats t = exponential(magnitude(v) * -2.f);
    Floats far = (1.f - t) / (1.f + t);
    return magnitude(v) < 0.3f ? near : v < 0.f ? -far : far;
}
