// Selected entries <-> the bytes of a message, as docs/wire-format.md gives them.
//
// Formats of indices: INT32, or UINT16 offsets in tiles of 65536 elements after a table of the tiles' entry counts.
// Formats of values: floats of 32, 64 and 16 bits, the last under one power of two for the whole message (in an 8-byte
// head), or bfloat16. Blocks are padded with zeros to multiples of 8 bytes; the host checks a message before it gets here.

enum { INT32_INDICES, UINT16_INDICES };
enum { FLOAT32_VALUES, FLOAT64_VALUES, FLOAT16_VALUES, BFLOAT16_VALUES };

#define WIRE_TILE_BITS 16
#define LOWEST_EXPONENT (-163)
#define HIGHEST_EXPONENT 113

__device__ __forceinline__ i64 padded(i64 bytes) { return (bytes + 7) / 8 * 8; }

__device__ __forceinline__ i64 table_bytes(int indices, i64 n) {
    return indices == UINT16_INDICES ? padded(4 * ((n + 65535) >> WIRE_TILE_BITS)) : 0;
}

__device__ __forceinline__ i64 index_bytes(int indices, i64 n, i64 count) {
    return indices == UINT16_INDICES ? table_bytes(indices, n) + padded(2 * count) : padded(4 * count);
}

__device__ __forceinline__ int value_width(int values) {
    return values == FLOAT64_VALUES ? 8 : values == FLOAT32_VALUES ? 4 : 2;
}

// x * 2^exponent, -163 <= exponent <= 163, with at most one rounding.
__device__ __forceinline__ float times_power_of_two(float x, int exponent) {
    if (exponent >= -126 && exponent <= 127) return x * float_of((u32)(exponent + 127) << 23);
    // 2^exponent is no normal float32. The first factor keeps everything normal, so only the second rounds.
    const int first = exponent < 0 ? -100 : 100;
    x = x * float_of((u32)(first + 127) << 23);
    return x * float_of((u32)(exponent - first + 127) << 23);
}

// The largest magnitude, from its key, as float32 bits.
__device__ __forceinline__ u32 largest_bits(u64 key) { return bits_of((float)real_of(key)); }

// The exponent that brings the largest magnitude below 2^15, as frexp would tell it.
__device__ __forceinline__ int scale_exponent(u32 largest) {
    if (largest == 0) return 0;
    if (largest >= 0x7f800000u) return HIGHEST_EXPONENT;
    const int power = largest >> 23 ? (int)(largest >> 23) - 126 : -149 + 32 - __clz((int)largest);
    return power - 15;
}

__device__ __forceinline__ u16 half_of(float x, int exponent, bool clamps) {
    float scaled = times_power_of_two(x, -exponent);
    // Rounding up to 2^15 would read back as 2^128: infinity.
    if (clamps) scaled = scaled > 32752.0f ? 32752.0f : scaled < -32752.0f ? -32752.0f : scaled;
    return to_half(scaled);
}

// float32 -> bfloat16, to nearest, ties to even; what would round to infinity is cut off instead.
__device__ __forceinline__ u16 to_bfloat(float x) {
    const u32 bits = bits_of(x), magnitude = bits & 0x7fffffffu;
    if (magnitude < 0x7f7f8000u) return (u16)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    return (u16)(bits >> 16 | (magnitude > 0x7f800000u ? 0x40u : 0u));
}

// The chosen entries of all segments, in order: each segment's lie at a place of their own.
struct Chosen {
    const Segment* segments;
    const Found* found;
    const int* positions;
    const Real* values;
    int count_of_segments;
};

// Where the i-th of all chosen entries lies.
__device__ __forceinline__ int place_of(const Chosen& chosen, int i) {
    int low = 0, high = chosen.count_of_segments;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (chosen.found[middle].base <= i)
            low = middle;
        else
            high = middle;
    }
    return chosen.segments[low].place + i - chosen.found[low].base;
}

// Which, of the first `count`, is the first whose position is not below `edge`.
__device__ __forceinline__ int first_from(const Chosen& chosen, int count, i64 edge) {
    int low = 0, high = count;
    while (low < high) {
        const int middle = (int)(((i64)low + high) / 2);
        if (chosen.positions[place_of(chosen, middle)] < edge)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// How one value travels: its bits, and what receivers read.
__device__ __forceinline__ u64 value_bits(Real value, int values, int exponent, bool clamps) {
    if (values == FLOAT64_VALUES) return bits_of((double)value);
    const float x = (float)value;
    if (values == FLOAT32_VALUES) return bits_of(x);
    return values == FLOAT16_VALUES ? half_of(x, exponent, clamps) : to_bfloat(x);
}

__device__ __forceinline__ Real value_of_bits(u64 bits, int values, int exponent) {
    if (values == FLOAT64_VALUES) {
        union {
            u64 i;
            double f;
        } both;
        both.i = bits;
        return (Real)both.f;
    }
    if (values == FLOAT32_VALUES) return (Real)float_of((u32)bits);
    if (values == BFLOAT16_VALUES) return (Real)from_bfloat((u16)bits);
    return (Real)times_power_of_two(from_half((u16)bits), exponent);
}

// Write the payload, and what receivers read of it. Does nothing of that while a segment is unfinished.
// grid (any), block (THREADS).
//
// positions, values: (k), the entries. n: elements of the bucket's sparse part. payload: (words) of 8 bytes, in the
// host's memory, as result: the bytes of found and of summary, for the host to read. sent_positions, sent_values: (k).
extern "C" __global__ void __launch_bounds__(THREADS) dgc_send(
    const Segment* __restrict__ segments, const Found* __restrict__ found, const Summary* __restrict__ summary,
    const int* __restrict__ positions, const Real* __restrict__ chosen, int count_of_segments, i64 n, int indices,
    int values, u64* __restrict__ payload, i64 words, int* __restrict__ sent_positions,
    Real* __restrict__ sent_values, u64* __restrict__ result) {
    const i64 me = (i64)blockIdx.x * THREADS + threadIdx.x, all = (i64)gridDim.x * THREADS;
    const i64 states = count_of_segments * (i64)(sizeof(Found) / 8);
    for (i64 w = me; w < states; w += all) result[w] = ((const u64*)found)[w];
    for (i64 w = me; w < (i64)(sizeof(Summary) / 8); w += all) result[states + w] = ((const u64*)summary)[w];
    if (summary->unfinished) return;
    const Chosen entries = {segments, found, positions, chosen, count_of_segments};
    const int count = summary->count;
    const u32 largest = largest_bits(summary->largest);
    const int exponent = values == FLOAT16_VALUES ? scale_exponent(largest) : 0;
    const bool clamps = exponent == HIGHEST_EXPONENT && largest < 0x7f800000u;
    const i64 table = table_bytes(indices, n), values_at = index_bytes(indices, n, count);
    const i64 head = values == FLOAT16_VALUES ? 8 : 0;
    const int width = value_width(values);
    for (i64 w = me; w < words; w += all) {
        const i64 at = 8 * w;
        u64 word = 0;
        if (at < table) {
            int edge = first_from(entries, count, (2 * w) << WIRE_TILE_BITS);
            for (int j = 0; j < 2; j++) {
                const int next = first_from(entries, count, (2 * w + j + 1) << WIRE_TILE_BITS);
                word |= (u64)(u32)(next - edge) << 32 * j;
                edge = next;
            }
        } else if (at < values_at) {
            const int per = indices == UINT16_INDICES ? 4 : 2;
            for (int j = 0; j < per; j++) {
                const i64 i = (at - table) / 8 * per + j;
                if (i >= count) continue;
                const int p = positions[place_of(entries, (int)i)];
                word |= (u64)(u32)(indices == UINT16_INDICES ? p & 65535 : p) << 64 / per * j;
            }
        } else if (at < values_at + head) {
            word = (u32)exponent;
        } else {
            const int per = 8 / width;
            for (int j = 0; j < per; j++) {
                const i64 i = (at - values_at - head) / width + j;
                if (i >= count) continue;
                word |= value_bits(chosen[place_of(entries, (int)i)], values, exponent, clamps) << 64 / per * j;
            }
        }
        payload[w] = word;
    }
    for (i64 i = me; i < count; i += all) {
        const int at = place_of(entries, (int)i);
        sent_positions[i] = positions[at];
        sent_values[i] = value_of_bits(value_bits(chosen[at], values, exponent, clamps), values, exponent);
    }
}

// Where one tensor's result is.
struct Target {
    Real* result;
    i64 offset;  // of its first element in the bucket
    i64 length;
    i64 first_tile;
};

__device__ __forceinline__ void add_at(const Target* targets, int count, i64 position, Real value) {
    int low = 0, high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (targets[middle].offset <= position)
            low = middle;
        else
            high = middle;
    }
    const i64 i = position - targets[low].offset;
    if (i >= 0 && i < targets[low].length) targets[low].result[i] = targets[low].result[i] + value;
}

static_assert(sizeof(Target) == 32, "the host's table");

// Where in a message the first entry is that is not before `position`.
//
// ends: for UINT16_INDICES, how many entries there are up to the end of each of the (tiles) wire tiles.
__device__ __forceinline__ int first_entry(
    const u8* payload, int indices, int count, const int* ends, i64 tiles, i64 position) {
    int low = 0, high = count;
    if (indices != UINT16_INDICES) {
        while (low < high) {
            const int middle = (int)(((i64)low + high) / 2);
            if (((const int*)payload)[middle] < position)
                low = middle + 1;
            else
                high = middle;
        }
        return low;
    }
    const i64 tile = position >> WIRE_TILE_BITS;
    if (tile >= tiles) return count;
    low = tile > 0 ? ends[tile - 1] : 0;
    high = ends[tile];
    const u16* const offsets = (const u16*)(payload + padded(4 * tiles));
    while (low < high) {
        const int middle = (int)(((i64)low + high) / 2);
        if (offsets[middle] < (position & 65535))
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// Set the results to the sum of all ranks' messages, in rank order. Every block adds up one tile of a result by itself,
// rank by rank, so the sums do not depend on who comes first. grid (tiles), block (THREADS).
//
// came: a payload every `stride` bytes. counts: (ranks), entries. ends: (ranks, wire tiles), see first_entry. targets: (S).
extern "C" __global__ void __launch_bounds__(THREADS) dgc_receive(
    const u8* __restrict__ came, i64 stride, const int* __restrict__ counts, const int* __restrict__ ends, int ranks,
    i64 n, int indices, int values, const Target* __restrict__ targets, const int* __restrict__ tile_segment,
    double factor) {
    __shared__ Real sums[TILE];
    __shared__ int edges[THREADS];
    const Target target = targets[tile_segment[blockIdx.x]];
    const i64 start = ((i64)blockIdx.x - target.first_tile) * TILE;
    const int size = target.length - start < TILE ? (int)(target.length - start) : TILE;
    const i64 first = target.offset + start, tiles = (n + 65535) >> WIRE_TILE_BITS;
    const i64 tile = first >> WIRE_TILE_BITS;
    const Real share = (Real)factor;
    for (int i = threadIdx.x; i < TILE; i += THREADS) sums[i] = (Real)0;
    for (int group = 0; group < ranks; group += THREADS / 2) {
        __syncthreads();
        const int mine = group + threadIdx.x / 2;
        if (mine < ranks)
            edges[threadIdx.x] = first_entry(
                came + mine * stride, indices, counts[mine], ends + mine * tiles, tiles,
                first + (threadIdx.x % 2 ? size : 0));
        __syncthreads();
        for (int r = group; r < ranks && r < group + THREADS / 2; r++) {
            const int begin = edges[2 * (r - group)], end = edges[2 * (r - group) + 1];
            if (begin == end) continue;
            const u8* const payload = came + r * stride;
            const u8* const numbers = payload + index_bytes(indices, n, counts[r]);
            const int exponent = values == FLOAT16_VALUES ? *(const int*)numbers : 0;
            const u8* const first_number = numbers + (values == FLOAT16_VALUES ? 8 : 0);
            // A tile of a result may begin in one wire tile and end in the next.
            const int split = indices == UINT16_INDICES ? ends[r * tiles + tile] : 0;
            for (int i = begin + threadIdx.x; i < end; i += THREADS) {
                const i64 position =
                    indices == UINT16_INDICES
                        ? ((tile + (i >= split)) << WIRE_TILE_BITS) + ((const u16*)(payload + padded(4 * tiles)))[i]
                        : ((const int*)payload)[i];
                u64 bits;
                if (values == FLOAT64_VALUES)
                    bits = ((const u64*)first_number)[i];
                else if (values == FLOAT32_VALUES)
                    bits = ((const u32*)first_number)[i];
                else
                    bits = ((const u16*)first_number)[i];
                sums[position - first] = sums[position - first] + value_of_bits(bits, values, exponent) * share;
            }
            __syncthreads();
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += THREADS) target.result[start + i] = sums[i];
}
