// Causal attention of the sequences of one micro-batch: keys and values packed once per key head, then the same
// micro-kernels as the linears, block of queries by block of queries, with float32 softmax.
#pragma once
#include <cstdlib>

#include "linear.h"

// Memory of one thread that only grows.
class Buffer {
    char *data_ = nullptr;
    size_t size_ = 0;

  public:
    ~Buffer() { free(data_); }
    template <class T> T *of(size_t count) {
        const size_t bytes = (count * sizeof(T) + 4095) / 4096 * 4096;
        if (bytes > size_) {
            free(data_);
            data_ = (char *)aligned_alloc(4096, bytes);
            if (!data_) abort();
            memset(data_, 0, bytes);
            size_ = bytes;
        }
        return (T *)data_;
    }
};

struct Attention {
    bool bf16;
    const char *queries; size_t query_stride;
    const char *local; size_t local_stride; int column;  // keys at `column`, values num_kv * dim channels later
    const char *kept; size_t kept_stride;
    int num_sequences;
    const int32_t *query_start, *query_count, *cu_keys, *key_index;
    int num_kept, num_heads, num_kv, dim, window;         // window 0: none
    float scale, softcap;                                 // softcap 0: none
};

static inline size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

// keys [count, dim] -> panels of 64 keys. Groups past the head's own are zero.
static inline void pack_keys(const Attention &t, const int32_t *index, int count, int head, int groups, char *panels) {
    const int size = t.bf16 ? 2 : 4, words = t.dim * size / 4;
    for (int j = 0; j < count; j++) {
        const int at = index[j];
        const char *row = at < t.num_kept ? t.kept + at * t.kept_stride + (size_t)head * t.dim * size
                                          : t.local + (at - t.num_kept) * t.local_stride + ((size_t)t.column + (size_t)head * t.dim) * size;
        char *to = panels + place(j, 0, groups);
        for (int g = 0; g < groups; g += STEP_GROUPS, to += PANEL_STEP_BYTES)
            for (int k = 0; k < STEP_GROUPS; k++) {
                uint32_t word = 0;
                if (g + k < words) memcpy(&word, row + (g + k) * 4, 4);
                memcpy(to + k * STEP_BYTES, &word, 4);
            }
    }
}
// values [count, dim] -> panels of 64 channels, keys along k. Keys past the last one are zero. Are all of them finite?
static inline bool pack_values(const Attention &t, const int32_t *index, int count, int head, int groups, char *panels) {
    const int size = t.bf16 ? 2 : 4, per = 4 / size, columns = (int)round_up(t.dim, PANEL);
    const size_t width = (size_t)t.num_kv * t.dim;
    auto row_of = [&](int j) {
        const int at = index[j];
        return at < t.num_kept ? t.kept + at * t.kept_stride + (width + (size_t)head * t.dim) * size
                               : t.local + (at - t.num_kept) * t.local_stride + (t.column + width + (size_t)head * t.dim) * size;
    };
    const Words exponent = Words{} + 0x7f800000u, low_exponent = Words{} + (t.bf16 ? 0x7f80u : 0x7f800000u);
    Ints odd{};
    for (int g = 0; g < groups; g++) {
        const bool first = g * per < count, second = per == 2 && g * per + 1 < count;
        const char *a = first ? row_of(g * per) : nullptr, *b = second ? row_of(g * per + 1) : nullptr;
        for (int c0 = 0; c0 < columns; c0 += LANES) {
            uint32_t *to = (uint32_t *)(panels + place(c0, g, groups));
            const int valid = t.dim - c0 < LANES ? t.dim - c0 : LANES;
            if (!first || valid < LANES) memset(to, 0, STEP_BYTES);
            if (!first || valid <= 0) continue;
            if (!t.bf16) memcpy(to, a + (size_t)c0 * 4, valid * 4);
            else {
                const uint16_t *low = (const uint16_t *)a + c0, *high = (const uint16_t *)b + (second ? c0 : 0);
                for (int c = 0; c < valid; c++) to[c] = low[c] | (second ? (uint32_t)high[c] << 16 : 0u);
            }
            Words words;
            memcpy(&words, to, sizeof words);
            odd |= ((words & exponent) == exponent) | ((words & low_exponent) == low_exponent);
        }
    }
    for (int i = 0; i < LANES; i++)
        if (odd[i]) return false;
    return true;
}

// Scores of one row, keys [begin, end) of `count` (a multiple of 16), to weights of the sum; returns 1 / their sum.
static inline float softmax(const Attention &t, float *scores, int begin, int end, int count, char *weights) {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int from = begin / LANES * LANES, to = (int)round_up(end, LANES);
    auto inside = [&](int j) { return (lane + j >= begin) & (lane + j < end); };
    if (t.softcap > 0)
        for (int j = from; j < to; j += LANES) {
            store(scores + j, hyperbolic_tangent(load(scores + j) * (t.scale / t.softcap)) * t.softcap);
        }
    const float scale = t.softcap > 0 ? 1.f : t.scale;
    Floats most = splat(-INFINITY);
    for (int j = from; j < to; j += LANES) most = larger(most, inside(j) ? load(scores + j) * scale : splat(-INFINITY));
    const float top = max_of(most);
    Floats sum{};
    auto put = [&](int j, Floats v) {
        if (t.bf16) store_bf16((uint16_t *)weights + j, v);
        else store((float *)weights + j, v);
    };
    for (int j = 0; j < from; j += LANES) put(j, Floats{});
    for (int j = from; j < to; j += LANES) {
        Floats v = inside(j) ? exponential(load(scores + j) * scale - top) : Floats{};
        sum += v;
        put(j, v);
    }
    for (int j = to; j < count; j += LANES) put(j, Floats{});
    return 1.f / sum_of(sum);
}

// Keys that a block leaves out are a multiple of this, so that the partial sums of a row are the same in every block.
constexpr int WINDOW_STEP = 128;
static_assert(WINDOW_STEP % PANEL == 0 && WINDOW_STEP % Float32Tile::SUM_GROUPS == 0, "");

// write(query row, first channel of all heads, values, how many)
template <class Tile, class Write> static inline void attend(const Attention &t, Write &&write) {
    static thread_local Buffer keys_buffer, values_buffer, query_buffer, score_buffer, weight_buffer;
    const int size = t.bf16 ? 2 : 4, per = 4 / size, repeat = t.num_heads / t.num_kv;
    const int padded = (int)round_up(t.dim, STEP_BYTES / size), groups = padded / per;
    alignas(64) float block[MOST_ROWS * PANEL];
    for (int s = 0; s < t.num_sequences; s++) {
        const int32_t *index = t.key_index + t.cu_keys[s];
        const int length = t.cu_keys[s + 1] - t.cu_keys[s], count = t.query_count[s], first = length - count;
        if (count == 0) continue;
        const int rows = count * repeat;
        const int value_groups = (int)round_up(length, PANEL) / per;  // a multiple of STEP_GROUPS
        const size_t row_bytes = (size_t)padded * size, wide = round_up(length, PANEL);
        char *keys = keys_buffer.of<char>(wide * groups * GROUP_BYTES);
        char *values = values_buffer.of<char>(round_up(t.dim, PANEL) * value_groups * GROUP_BYTES);
        char *query = query_buffer.of<char>((size_t)(rows + MOST_ROWS) * row_bytes);
        float *scores = score_buffer.of<float>(MOST_ROWS * wide);
        char *weights = weight_buffer.of<char>(MOST_ROWS * wide * size);
        for (int head = 0; head < t.num_kv; head++) {
            pack_keys(t, index, length, head, groups, keys);
            const bool finite = pack_values(t, index, length, head, value_groups, values);
            const int most = finite ? Tile::rows : 1;  // 0 times NaN is NaN: each query gets only values that it sees
            for (int i = 0; i < count; i++)  // a key head's queries of one position are neighbours: blocks end late in time together
                for (int r = 0; r < repeat; r++) {
                    char *to = query + (size_t)(i * repeat + r) * row_bytes;
                    memcpy(to, t.queries + (size_t)(t.query_start[s] + i) * t.query_stride + (size_t)(head * repeat + r) * t.dim * size, (size_t)t.dim * size);
                    memset(to + (size_t)t.dim * size, 0, row_bytes - (size_t)t.dim * size);
                }
            for (int m = 0; m < rows; m += most) {
                const int used = rows - m < most ? rows - m : most;
                const int earliest = first + m / repeat, latest = first + (m + used - 1) / repeat;
                const int begin = t.window && earliest - t.window + 1 > 0 ? (earliest - t.window + 1) / WINDOW_STEP * WINDOW_STEP : 0;
                const int span = latest + 1 - begin, stepped = (int)round_up(span, STEP_BYTES / size);
                for (int j = 0; j < span; j += Tile::cols) {
                    const char *b = keys + place(begin + j, 0, groups);
                    Tile::run(query + m * row_bytes, row_bytes, b, groups, scores + j, (int)wide);
                }
                float inverse[MOST_ROWS];
                for (int i = 0; i < used; i++) {
                    const int position = first + (m + i) / repeat;
                    const int low = t.window && position - t.window + 1 > begin ? position - t.window + 1 - begin : 0;
                    inverse[i] = softmax(t, scores + i * wide, low, position + 1 - begin, stepped, weights + i * wide * size);
                }
                if (!finite) pack_values(t, index, latest + 1, head, value_groups, values);
                for (int c = 0; c < t.dim; c += Tile::cols) {
                    const char *b = values + place(c, begin / per, value_groups);
                    Tile::run(weights, wide * size, b, stepped / per, block, Tile::cols);
                    for (int i = 0; i < used; i++) {
                        const int head_index = head * repeat + (m + i) % repeat, row = t.query_start[s] + (m + i) / repeat;
                        for (int k = 0; k < Tile::cols && c + k < t.dim; k += LANES) {
                            const int left = t.dim - c - k;
                            write(row, head_index * t.dim + c + k, load(block + i * Tile::cols + k) * inverse[i], left < LANES ? left : LANES);
                        }
                    }
                }
            }
        }
    }
}
