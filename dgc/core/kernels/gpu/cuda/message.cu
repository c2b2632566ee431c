// Selected entries on their way to the host and back, as positions and values: codecs are the host's.

// Where the chosen entries of all segments are: each segment's lie at a place of their own.
struct Chosen {
    const Segment* segments;
    const Found* found;
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

// Write the chosen entries to the host. Does nothing of that while a segment is unfinished.
// grid (any), block (THREADS).
//
// positions, values: (k), each segment's at its place. sent_positions, sent_values: (k), in the host's memory, as result:
// the bytes of found and of summary, for the host to read.
extern "C" __global__ void __launch_bounds__(THREADS) dgc_send(
    const Segment* __restrict__ segments, const Found* __restrict__ found, const Summary* __restrict__ summary,
    const int* __restrict__ positions, const Real* __restrict__ values, int count_of_segments,
    int* __restrict__ sent_positions, Real* __restrict__ sent_values, u64* __restrict__ result) {
    const i64 me = (i64)blockIdx.x * THREADS + threadIdx.x, all = (i64)gridDim.x * THREADS;
    const i64 states = count_of_segments * (i64)(sizeof(Found) / 8);
    for (i64 w = me; w < states; w += all) result[w] = ((const u64*)found)[w];
    for (i64 w = me; w < (i64)(sizeof(Summary) / 8); w += all) result[states + w] = ((const u64*)summary)[w];
    if (summary->unfinished) return;
    const Chosen entries = {segments, found, count_of_segments};
    for (i64 i = me; i < summary->count; i += all) {
        const int at = place_of(entries, (int)i);
        sent_positions[i] = positions[at];
        sent_values[i] = values[at];
    }
}

// Where one tensor's result is.
struct Target {
    Real* result;
    i64 offset;  // of its first element in the bucket
    i64 length;
    i64 first_tile;
};

static_assert(sizeof(Target) == 32, "the host's table");

// The first of the entries from `low` to `high`, whose positions ascend, that is not before `position`.
__device__ __forceinline__ int first_entry(const int* positions, int low, int high, i64 position) {
    while (low < high) {
        const int middle = low + (high - low) / 2;
        if (positions[middle] < position)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

// Set the results to the sum of all ranks' entries, in rank order. Every block adds up one tile of a result by itself,
// rank by rank, so the sums do not depend on who comes first. grid (tiles), block (THREADS).
//
// starts: (ranks + 1), where each rank's entries begin in positions and values. targets: (S).
extern "C" __global__ void __launch_bounds__(THREADS) dgc_receive(
    const int* __restrict__ positions, const Real* __restrict__ values, const int* __restrict__ starts, int ranks,
    const Target* __restrict__ targets, const int* __restrict__ tile_segment, double factor) {
    __shared__ Real sums[TILE];
    __shared__ int edges[THREADS];
    const Target target = targets[tile_segment[blockIdx.x]];
    const i64 start = ((i64)blockIdx.x - target.first_tile) * TILE;
    const int size = target.length - start < TILE ? (int)(target.length - start) : TILE;
    const i64 first = target.offset + start;
    const Real share = (Real)factor;
    for (int i = threadIdx.x; i < TILE; i += THREADS) sums[i] = (Real)0;
    for (int group = 0; group < ranks; group += THREADS / 2) {
        __syncthreads();
        const int mine = group + threadIdx.x / 2;
        if (mine < ranks)
            edges[threadIdx.x] =
                first_entry(positions, starts[mine], starts[mine + 1], first + (threadIdx.x % 2 ? size : 0));
        __syncthreads();
        for (int r = group; r < ranks && r < group + THREADS / 2; r++) {
            const int end = edges[2 * (r - group) + 1];
            for (int i = edges[2 * (r - group)] + threadIdx.x; i < end; i += THREADS)
                sums[positions[i] - first] = sums[positions[i] - first] + values[i] * share;
            __syncthreads();
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < size; i += THREADS) target.result[start + i] = sums[i];
}
