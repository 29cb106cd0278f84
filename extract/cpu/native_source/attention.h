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

// keys [count, dim] -> panels of 64 keys: [groups][64] words. Groups past the head's own are zero.
static inline void pack_keys(const Attention &t, const int32_t *index, int count, int head, int groups, uint32_t *panels) {
    const int size = t.bf16 ? 2 : 4, words = t.dim * size / 4;
    const size_t width = (size_t)t.num_kv * t.dim;
    (void)width;
    for (int j = 0; j < count; j++) {
        const int at = index[j];
        const char *row = at < t.num_kept ? t.kept + at * t.kept_stride + (size_t)head * t.dim * size
                                          : t.local + (at - t.num_kept) * t.local_stride + ((size_t)t.column + (size_t)head * t.dim) * size;
        uint32_t *to = panels + (size_t)(j / PANEL) * groups * PANEL + j % PANEL;
        for (int g = 0; g < words; g++) { uint32_t word; memcpy(&word, row + g * 4, 4); to[(size_t)g * PANEL] = word; }
        for (int g = words; g < groups; g++) to[(size_t)g * PANEL] = 0;
    }
}
// values [count, dim] -> panels of 64 channels: [key groups][64] words. Keys past the last one are zero.
static inline void pack_values(const Attention &t, const int32_t *index, int count, int head, int groups, uint32_t *panels) {
    const int size = t.bf16 ? 2 : 4, per = 4 / size, columns = (int)round_up(t.dim, PANEL);
    const size_t width = (size_t)t.num_kv * t.dim;
    auto row_of = [&](int j) {
        const int at = index[j];
        return at < t.num_kept ? t.kept + at * t.kept_stride + (width + (size_t)head * t.dim) * size
                               : t.local + (at - t.num_kept) * t.local_stride + (t.column + width + (size_t)head * t.dim) * size;
    };
    for (int g = 0; g < groups; g++) {
        const bool first = g * per < count, second = per == 2 && g * per + 1 < count;
        const char *a = first ? row_of(g * per) : nullptr, *b = second ? row_of(g * per + 1) : nullptr;
        for (int c0 = 0; c0 < columns; c0 += PANEL) {
            uint32_t *to = panels + ((size_t)(c0 / PANEL) * groups + g) * PANEL;
            const int valid = t.dim - c0 < PANEL ? t.dim - c0 : PANEL;
            if (!first || valid < PANEL) memset(to, 0, ROW_BYTES);
            if (!first) continue;
            if (!t.bf16) { memcpy(to, a + (size_t)c0 * 4, valid * 4); continue; }
            const uint16_t *low = (const uint16_t *)a + c0, *high = (const uint16_t *)b + (second ? c0 : 0);
            for (int c = 0; c < valid; c++) to[c] = low[c] | (second ? (uint32_t)high[c] << 16 : 0u);
        }
    }
}

// Scores of one row, keys [begin, end) of `count` (a multiple of 16), to weights of the sum; returns 1 / their sum.
static inline float softmax(const Attention &t, float *scores, int begin, int end, int count, char *weights) {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const int from = begin / LANES * LANES, to = (int)round_up(end, LANES);
    auto inside = [&](int j) { return (lane + j >= begin) & (lane + j < end); };
    if (t.softcap > 0)
        for (int j = from; j < to; j += LANES) {
            Floats z = load(scores + j) * (2.f * t.scale / t.softcap);
            store(scores + j, (1.f - 2.f / (exponential(z) + 1.f)) * t.softcap);
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
        const int value_groups = (int)round_up(length, PANEL) / per;
        const size_t row_bytes = (size_t)padded * size, wide = round_up(length, PANEL);
        uint32_t *keys = keys_buffer.of<uint32_t>(wide * groups);
        uint32_t *values = values_buffer.of<uint32_t>(round_up(t.dim, PANEL) * value_groups);
        char *query = query_buffer.of<char>((size_t)(rows + MOST_ROWS) * row_bytes);
        float *scores = score_buffer.of<float>(MOST_ROWS * wide);
        char *weights = weight_buffer.of<char>(MOST_ROWS * wide * size);
        for (int head = 0; head < t.num_kv; head++) {
            pack_keys(t, index, length, head, groups, keys);
            pack_values(t, index, length, head, value_groups, values);
            for (int i = 0; i < count; i++)  // a key head's queries of one position are neighbours: blocks end late in time together
                for (int r = 0; r < repeat; r++) {
                    char *to = query + (size_t)(i * repeat + r) * row_bytes;
                    memcpy(to, t.queries + (size_t)(t.query_start[s] + i) * t.query_stride + (size_t)(head * repeat + r) * t.dim * size, (size_t)t.dim * size);
                    memset(to + (size_t)t.dim * size, 0, row_bytes - (size_t)t.dim * size);
                }
            for (int m = 0; m < rows; m += Tile::rows) {
                const int used = rows - m < Tile::rows ? rows - m : Tile::rows;
                const int earliest = first + m / repeat, latest = first + (m + used - 1) / repeat;
                const int begin = t.window && earliest - t.window + 1 > 0 ? (earliest - t.window + 1) / PANEL * PANEL : 0;
                const int span = latest + 1 - begin, stepped = (int)round_up(span, STEP_BYTES / size);
                for (int j = 0; j < span; j += Tile::cols) {
                    const int key = begin + j;
                    const char *b = (const char *)(keys + (size_t)(key / PANEL) * groups * PANEL + key % PANEL);
                    Tile::run(query + m * row_bytes, row_bytes, b, groups, scores + j, (int)wide);
                }
                float inverse[MOST_ROWS];
                for (int i = 0; i < used; i++) {
                    const int position = first + (m + i) / repeat;
                    const int low = t.window && position - t.window + 1 > begin ? position - t.window + 1 - begin : 0;
                    inverse[i] = softmax(t, scores + i * wide, low, position + 1 - begin, stepped, weights + i * wide * size);
                }
                for (int c = 0; c < t.dim; c += Tile::cols) {
                    const char *b = (const char *)(values + ((size_t)(c / PANEL) * value_groups + begin / per) * PANEL + c % PANEL);
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
