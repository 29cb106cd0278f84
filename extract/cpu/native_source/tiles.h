// Micro-kernels: a few rows of the left side times a block of columns of packed weights.
//
// The left side is row-major; its rows are read in groups of four bytes along k (one float, two bfloat16, four bytes).
// The right side lies in panels of 64 columns, a panel in steps of 16 groups, a step in 4 squares of 16 groups by 16
// columns of four-byte words: a square is a kilobyte in a row, what one AMX tile holds, and as good for the others.
// A tile may read rows past the last one (buffers have spare rows); it never writes any.
#pragma once
#include "vectors.h"

constexpr int PANEL = 64;
constexpr int GROUP_BYTES = 4;
constexpr int STEP_GROUPS = 16;
constexpr int STEP_BYTES = STEP_GROUPS * GROUP_BYTES;  // k is padded to this many bytes of a left row
constexpr int SQUARE_BYTES = STEP_GROUPS * LANES * GROUP_BYTES;
constexpr int PANEL_STEP_BYTES = PANEL / LANES * SQUARE_BYTES;
constexpr int MOST_ROWS = 32;

enum Precision { FLOAT32 = 0, BFLOAT16 = 1, INT8 = 2 };
static inline int bytes_of(int precision) { return precision == FLOAT32 ? 4 : precision == BFLOAT16 ? 2 : 1; }

// Where the word of a column and a k-group lies, in bytes from the panels' begin.
static inline size_t place(int column, int group, int groups) {
    const size_t step = (size_t)(column / PANEL) * (groups / STEP_GROUPS) + group / STEP_GROUPS;
    return step * PANEL_STEP_BYTES + column % PANEL / LANES * SQUARE_BYTES + (group % STEP_GROUPS * LANES + column % LANES) * GROUP_BYTES;
}

// c[rows][ldc] = a [rows, groups] times b, where b is the place of the block's first column.
struct Float32Tile {
    // Sums of at most this many products at a time, then a sum of these: half the rounding error of one long sum.
    static constexpr int SUM_GROUPS = 128;
    static constexpr int rows = 6;
#if defined(__AVX512F__)
    static constexpr int cols = 64;
#else
    static constexpr int cols = 16;
#endif
    static inline void run(const char *a, size_t lda, const char *b, int groups, float *c, int ldc) {
        for (int step = 0; step < groups; step += SUM_GROUPS) {
            const int count = groups - step < SUM_GROUPS ? groups - step : SUM_GROUPS;
            part(a, lda, b, count, c, ldc, step > 0);
            a += (size_t)SUM_GROUPS * GROUP_BYTES;
            b += (size_t)SUM_GROUPS / STEP_GROUPS * PANEL_STEP_BYTES;
        }
    }

  private:
    static inline void part(const char *a, size_t lda, const char *b, int groups, float *c, int ldc, bool add) {
        constexpr int wide = cols / LANES;
        Floats sum[rows][wide] = {};
        for (int step = 0; step < groups; step += STEP_GROUPS, b += PANEL_STEP_BYTES, a += STEP_BYTES)
            for (int k = 0; k < STEP_GROUPS; k++) {
                Floats right[wide];
                for (int j = 0; j < wide; j++) right[j] = load((const float *)(b + j * SQUARE_BYTES) + k * LANES);
#pragma GCC unroll 6
                for (int i = 0; i < rows; i++) {
                    Floats left = splat(*(const float *)(a + i * lda + k * GROUP_BYTES));
#pragma GCC unroll 4
                    for (int j = 0; j < wide; j++) sum[i][j] += left * right[j];
                }
            }
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < wide; j++) {
                float *to = c + i * ldc + j * LANES;
                store(to, add ? load(to) + sum[i][j] : sum[i][j]);
            }
    }
};

#if defined(__AVX512BF16__)
struct Bfloat16Tile {
    static constexpr int rows = 6, cols = 64;
    static inline void run(const char *a, size_t lda, const char *b, int groups, float *c, int ldc) {
        __m512 sum[rows][4];
        for (auto &row : sum)
            for (auto &v : row) v = _mm512_setzero_ps();
        for (int step = 0; step < groups; step += STEP_GROUPS, b += PANEL_STEP_BYTES, a += STEP_BYTES)
            for (int k = 0; k < STEP_GROUPS; k++) {
                __m512i right[4];
                for (int j = 0; j < 4; j++) right[j] = _mm512_loadu_si512(b + j * SQUARE_BYTES + k * 64);
#pragma GCC unroll 6
                for (int i = 0; i < rows; i++) {
                    __m512i left = _mm512_set1_epi32(*(const int *)(a + i * lda + k * GROUP_BYTES));
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++) sum[i][j] = _mm512_dpbf16_ps(sum[i][j], (__m512bh)left, (__m512bh)right[j]);
                }
            }
        for (int i = 0; i < rows; i++)
            for (int j = 0; j < 4; j++) _mm512_storeu_ps(c + i * ldc + j * LANES, sum[i][j]);
    }
};
#endif

#if defined(__AVX512VNNI__)
// Left bytes are unsigned, right ones signed; sums are int32, left as such in c.
struct Int8Tile {
    static constexpr int rows = 6, cols = 64;
    static inline void run(const char *a, size_t lda, const char *b, int groups, float *c, int ldc) {
        // Named accumulators and one instruction by hand: from an array GCC 12 spills integer vectors (half the speed).
#define EACH(F) F(0) F(1) F(2) F(3) F(4) F(5)
#define DECLARE(i) __m512i s##i##0 = _mm512_setzero_si512(), s##i##1 = s##i##0, s##i##2 = s##i##0, s##i##3 = s##i##0;
#define DOT(s, r) asm("vpdpbusd %2, %1, %0" : "+v"(s) : "v"(left), "v"(r))
#define MULTIPLY(i) \
    left = _mm512_set1_epi32(*(const int *)(a + i * lda + k * GROUP_BYTES)); \
    DOT(s##i##0, r0); DOT(s##i##1, r1); DOT(s##i##2, r2); DOT(s##i##3, r3);
#define STORE(i) \
    _mm512_storeu_si512(c + i * ldc, s##i##0); _mm512_storeu_si512(c + i * ldc + 16, s##i##1); \
    _mm512_storeu_si512(c + i * ldc + 32, s##i##2); _mm512_storeu_si512(c + i * ldc + 48, s##i##3);
        EACH(DECLARE)
        for (int step = 0; step < groups; step += STEP_GROUPS, b += PANEL_STEP_BYTES, a += STEP_BYTES)
            for (int k = 0; k < STEP_GROUPS; k++) {
                const char *bk = b + k * 64;
                __m512i r0 = _mm512_loadu_si512(bk), r1 = _mm512_loadu_si512(bk + SQUARE_BYTES), left,
                        r2 = _mm512_loadu_si512(bk + 2 * SQUARE_BYTES), r3 = _mm512_loadu_si512(bk + 3 * SQUARE_BYTES);
                EACH(MULTIPLY)
            }
        EACH(STORE)
#undef EACH
#undef DECLARE
#undef DOT
#undef MULTIPLY
#undef STORE
    }
};
#endif

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__linux__)
#define HAS_AMX 1
#include <sys/syscall.h>
#include <unistd.h>

// Linux gives the tile registers to a process that asks for them.
static inline bool amx_allowed() {
    static const bool allowed = syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* XTILEDATA */) == 0;
    return allowed;
}
// Eight tiles of 16 rows of 64 bytes while in scope. Released at the end: other libraries set the tiles up their way.
struct AmxScope {
    AmxScope() {
        struct alignas(64) { uint8_t palette, start, unused[14]; uint16_t bytes[16]; uint8_t rows[16]; } tiles = {};
        tiles.palette = 1;
        for (int i = 0; i < 8; i++) tiles.bytes[i] = 64, tiles.rows[i] = 16;
        asm volatile("ldtilecfg %0" ::"m"(tiles) : "memory");  // GCC's intrinsic lets the stores above be dropped
    }
    ~AmxScope() { _tile_release(); }
};
// 32 rows times 32 columns: four sums, two tiles of each side.
template <bool INTEGERS> struct AmxTile {
    static constexpr int rows = 32, cols = 32;
    static inline void run(const char *a, size_t lda, const char *b, int groups, float *c, int ldc) {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        const char *lower = a + 16 * lda;
        for (int step = 0; step < groups; step += STEP_GROUPS, b += PANEL_STEP_BYTES) {
            _tile_loadd(4, a + step * GROUP_BYTES, lda);
            _tile_loadd(6, b, STEP_BYTES);
            _tile_loadd(7, b + SQUARE_BYTES, STEP_BYTES);
            _tile_loadd(5, lower + step * GROUP_BYTES, lda);
            if (INTEGERS) {
                _tile_dpbusd(0, 4, 6); _tile_dpbusd(1, 4, 7); _tile_dpbusd(2, 5, 6); _tile_dpbusd(3, 5, 7);
            } else {
                _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
            }
        }
        const size_t stride = (size_t)ldc * sizeof(float);
        _tile_stored(0, c, stride); _tile_stored(1, c + 16, stride);
        _tile_stored(2, c + 16 * ldc, stride); _tile_stored(3, c + 16 * ldc + 16, stride);
    }
};
#else
#define HAS_AMX 0
static inline bool amx_allowed() { return false; }
#endif
