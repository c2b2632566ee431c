// Exactly the k largest of each segment, ties to the lower position, in ascending order.
//
// sweep -> choose where every segment has a list of candidates that a block reads in a few rounds: one block for each.
// Otherwise sweep -> locate -> (refine -> locate) until every k-th largest key is known -> count -> scan -> emit. Each
// segment's entries go to a place of their own, with room for k; where they begin in the message is known at the end.
//
// A kernel looks at nothing that a block of its own launch wrote, except through atomic operations: additions whose
// order does not matter, and in choose what the last block reads of the others.

// Narrow the range of the k-th largest key down to one bin. Every thread of the block must call it.
//
// own: (BINS), zero again afterwards. want: how many of the entries in the bins are to be chosen, at least 1, at most
// their number. Returns the bin, and in `*left` how many entries of it are to be chosen.
__device__ __forceinline__ int descend(u32* own, u32 want, u32* left) {
    __shared__ int bin;
    __shared__ u32 rest;
    const int each = BINS / THREADS, top = BINS - 1 - threadIdx.x * each;
    u32 sum = 0;
    for (int i = 0; i < each; i++) sum += own[top - i];
    u64 total;
    u32 before = (u32)sum_before(sum, &total);
    if (before < want && want <= before + sum) {
        int i = 0;
        while (want > before + own[top - i]) before += own[top - i++];
        bin = top - i;
        rest = want - before;
    }
    __syncthreads();
    for (int i = 0; i < each; i++) own[top - i] = 0;
    *left = rest;
    return bin;
}

__device__ __forceinline__ void conclude(const Segment& segment, Found& state) {
    if (state.low == 0) {
        // Fewer than k entries are not zero: those are chosen, and no zero.
        state.taken = segment.k - state.want;
        state.want = 0;
    } else {
        state.taken = segment.k;
    }
}

// What a segment's candidates are good for: the range of the k-th largest key, or why there is none. Every thread of the
// block must call it. own: (BINS), their histogram, zero again afterwards.
__device__ __forceinline__ void judge(const Segment& segment, u32* own, Found& state) {
    bool searched = false;
    if (state.total > segment.most || (segment.open && state.total < segment.fewest)) {
        state.status = OUT_OF_RANGE;
    } else if (state.total < segment.k || segment.k == 0) {
        // All of them, and the rest at the next step.
        state.low = segment.key - 1;
        state.width = state.want = 0;
        state.taken = state.total;
    } else {
        u32 left;
        const int bin = descend(own, segment.k, &left);
        searched = true;
        state.want = left;
        if (segment.open) {
            state.low = segment.key + ((u64)bin << NEAR_SHIFT);
            state.width = NEAR_SHIFT;
            if (bin == BINS - 1) state.status = BEYOND_BINS;
        } else {
            state.low = (u64)bin << FAR_SHIFT;
            state.width = FAR_SHIFT;
        }
    }
    if (!searched)
        for (int i = threadIdx.x; i < BINS; i += THREADS) own[i] = 0;
}

__device__ __forceinline__ int shift_of(const Found& state) {
    return state.width > BIN_BITS ? state.width - BIN_BITS : 0;
}

// One more step of the search, with the histogram of the range that is left. Every thread of the block must call it.
__device__ __forceinline__ void narrow(const Segment& segment, u32* own, Found& state) {
    const int shift = shift_of(state);
    u32 left;
    const int bin = descend(own, state.want, &left);
    state.low += (u64)bin << shift;
    state.width = shift;
    state.want = left;
    if (shift == 0) conclude(segment, state);
}

__device__ __forceinline__ bool within(const Found& state, u64 key) {
    return key >= state.low && (key - state.low) >> state.width == 0;
}

// Judge the candidates (`begin`), or take the next step of the search. grid (S), block (THREADS).
//
// bins: (S, BINS), zero again afterwards.
extern "C" __global__ void __launch_bounds__(THREADS) dgc_locate(
    const Segment* __restrict__ segments, u32* __restrict__ bins, Found* __restrict__ found,
    Summary* __restrict__ summary, int begin) {
    const int s = blockIdx.x;
    const Segment segment = segments[s];
    if (segment.source == DONE) return;
    u32* const own = bins + (i64)s * BINS;
    Found state = found[s];
    if (begin && segment.source == WHOLE) {
        state.low = 0;
        state.width = KEY_BITS;
        state.want = segment.k;
    } else if (begin) {
        judge(segment, own, state);
    } else if (state.width > 0 && state.status == CHOSEN) {
        narrow(segment, own, state);
    } else {
        return;
    }
    __syncthreads();  // all threads have read found[s]
    if (threadIdx.x == 0) {
        found[s] = state;
        if (state.status != CHOSEN) summary->unfinished = 1;
    }
}

// A segment's whole selection from its candidates, by one block. grid (S), block (THREADS).
//
// runs: (tiles), positions, values: (room), the candidates. bins: (S, BINS), zero again afterwards. starts: (tiles),
// scratch. out_positions, out_values: (k). The block that comes last finds where each segment begins in the message.
extern "C" __global__ void __launch_bounds__(THREADS) dgc_choose(
    const Segment* __restrict__ segments, const Run* __restrict__ runs, const int* __restrict__ positions,
    const Real* __restrict__ values, u32* __restrict__ bins, int* starts, int* __restrict__ out_positions,
    Real* __restrict__ out_values, Found* found, Summary* summary, int count_of_segments) {
    __shared__ u32 tally[BINS];
    __shared__ bool last;
    const int s = blockIdx.x;
    const Segment segment = segments[s];
    Found state = found[s];
    judge(segment, bins + (i64)s * BINS, state);
    while (state.width > 0 && state.status == CHOSEN) {
        for (int i = threadIdx.x; i < BINS; i += THREADS) tally[i] = 0;
        __syncthreads();
        const int shift = shift_of(state);
        for (int i = threadIdx.x; i < state.total; i += THREADS) {
            const u64 key = key_of(values[segment.room + i]);
            if (within(state, key)) atomicAdd(&tally[(key - state.low) >> shift], 1u);
        }
        __syncthreads();
        narrow(segment, tally, state);
    }
    u64 total;
    if (state.status == CHOSEN && state.taken > 0) {
        int* const begins = starts + segment.first_tile;
        const Run* const own = runs + segment.first_tile;
        int carried = 0;
        for (int start = 0; start < segment.tiles; start += THREADS) {
            const int t = start + threadIdx.x;
            const int before = (int)sum_before(t < segment.tiles ? own[t].count : 0, &total);
            if (t < segment.tiles) begins[t] = carried + before;
            carried += (int)total;
        }
        __syncthreads();
        // The candidates in the order of their positions. Tiles put theirs down in any order.
        const u32 ties = state.want;
        u32 used = 0;
        int place = segment.place;
        for (int start = 0; start < state.total; start += THREADS) {
            const int i = start + threadIdx.x;
            int from = 0;
            u64 key = 0;
            if (i < state.total) {
                int low = 0, high = segment.tiles;
                while (high - low > 1) {
                    const int middle = (low + high) / 2;
                    if (begins[middle] <= i)
                        low = middle;
                    else
                        high = middle;
                }
                from = own[low].start + i - begins[low];
                key = key_of(values[from]);
            }
            const bool above = i < state.total && key > state.low, equal = i < state.total && key == state.low;
            const u64 before = sum_before((u64)above << 32 | (u64)equal, &total);
            const u32 equals = used + (u32)before;
            if (above || (equal && equals < ties)) {
                const int at = place + (int)(before >> 32) + (int)(equals < ties ? equals : ties);
                out_positions[at] = positions[from];
                out_values[at] = values[from];
            }
            place += (int)(total >> 32);
            used += (u32)total;
        }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        found[s] = state;
        if (state.status != CHOSEN) summary->unfinished = 1;
        __threadfence();
        last = atomicAdd(&summary->blocks, 1) == count_of_segments - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    u64 base = 0;
    for (int start = 0; start < count_of_segments; start += THREADS) {
        const int r = start + threadIdx.x;
        // Atomically, past this multiprocessor's own cache.
        const u64 before = sum_before(r < count_of_segments ? atomicAdd(&found[r].taken, 0) : 0, &total);
        if (r < count_of_segments) found[r].base = (int)(base + before);
        base += total;
    }
    if (threadIdx.x == 0) summary->count = (int)base;
}

// Histogram of the keys in the range that is left. grid (spans), block (THREADS).
//
// span_tile: (spans), the first tile of each span. v: the state, values: (room) the candidates. bins: (S, BINS), zero.
extern "C" __global__ void __launch_bounds__(THREADS) dgc_refine(
    const Segment* __restrict__ segments, const int* __restrict__ tile_segment, const int* __restrict__ span_tile,
    const Real* __restrict__ v, const Real* __restrict__ values, u32* __restrict__ bins,
    const Found* __restrict__ found) {
    __shared__ u32 tally[BINS];
    const int tile = span_tile[blockIdx.x], s = tile_segment[tile];
    const Segment segment = segments[s];
    const Found state = found[s];
    if (segment.source == DONE || state.width == 0 || state.status != CHOSEN) return;
    const int shift = shift_of(state);
    u32* const own = bins + (i64)s * BINS;
    const int part = (tile - segment.first_tile) / SPAN;
    if (segment.source == CANDIDATES) {
        const int parts = (segment.tiles + SPAN - 1) / SPAN, total = state.total;
        for (i64 i = part * THREADS + threadIdx.x; i < total; i += (i64)parts * THREADS) {
            const u64 key = key_of(values[segment.room + i]);
            if (within(state, key)) atomicAdd(&own[(key - state.low) >> shift], 1u);
        }
        return;
    }
    for (int i = threadIdx.x; i < BINS; i += THREADS) tally[i] = 0;
    __syncthreads();
    const i64 start = (i64)part * SPAN * TILE;
    const i64 stop = segment.length - start < SPAN * TILE ? segment.length : start + SPAN * TILE;
    for (i64 i = start + threadIdx.x; i < stop; i += THREADS) {
        const u64 key = key_of(v[segment.offset + i]);
        if (within(state, key)) atomicAdd(&tally[(key - state.low) >> shift], 1u);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS)
        if (tally[i]) atomicAdd(&own[i], tally[i]);
}

// The entries that a tile may choose from: `*n` values at the place returned. Positions are at the same place of the
// list of candidates, or count up from `*position` in a whole segment.
__device__ __forceinline__ const Real* entries_of(
    const Segment& segment, int tile, const Run* runs, const Real* v, const Real* values, int* n, i64* position) {
    const int start = (tile - segment.first_tile) * TILE;
    if (segment.source == CANDIDATES) {
        *n = runs[tile].count;
        return values + runs[tile].start;
    }
    *n = segment.length - start < TILE ? segment.length - start : TILE;
    *position = segment.offset + start;
    return v + *position;
}

// How many entries of each tile are above the k-th largest key (upper half of the sum), and how many equal it. In a
// segment that is searched as a whole, found.total becomes the number of entries that reach `wider` times the k-th
// largest magnitude: the rule for thresholds learns from it how steeply their number falls.
// grid (tiles / WARPS), block (THREADS): one warp for each tile.
extern "C" __global__ void __launch_bounds__(THREADS) dgc_count(
    const Segment* __restrict__ segments, const int* __restrict__ tile_segment, const Run* __restrict__ runs,
    const Real* __restrict__ v, const Real* __restrict__ values, Found* found, u64* __restrict__ sums, int tiles,
    double wider) {
    const int tile = blockIdx.x * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (tile >= tiles) return;
    const int s = tile_segment[tile];
    if (segments[s].source == DONE) return;
    const u64 key = found[s].low;
    const bool whole = segments[s].source == WHOLE && key > 0;
    const u64 below = whole ? key_of((Real)(wider * (double)real_of(key))) : ~0ull;
    int n;
    i64 position;
    const Real* const entries = entries_of(segments[s], tile, runs, v, values, &n, &position);
    u64 sum = 0, reach = 0;
    for (int i = lane; i < n; i += 32) {
        const u64 own = key_of(entries[i]);
        sum += own > key ? 1ull << 32 : own == key ? 1ull : 0ull;
        reach += own >= below;
    }
    sum = warp_sum(sum);
    if (whole) reach = warp_sum(reach);
    if (lane == 0) {
        sums[tile] = sum;
        if (whole) atomicAdd(&found[s].total, (int)reach);
    }
}

// Turn the sums of tiles into sums over all earlier tiles of the segment, and find where each segment's entries begin.
// grid (S), block (THREADS).
extern "C" __global__ void __launch_bounds__(THREADS) dgc_scan(
    const Segment* __restrict__ segments, u64* __restrict__ sums, Found* __restrict__ found,
    Summary* __restrict__ summary, int count_of_segments) {
    const int s = blockIdx.x;
    const int first = segments[s].first_tile, tiles = segments[s].source == DONE ? 0 : segments[s].tiles;
    u64 carried = 0, total;
    for (int start = 0; start < tiles; start += THREADS) {
        const int t = start + threadIdx.x;
        const u64 own = t < tiles ? sums[first + t] : 0;
        const u64 before = sum_before(own, &total);
        if (t < tiles) sums[first + t] = carried + before;
        carried += total;
    }
    u64 earlier = 0;
    for (int r = threadIdx.x; r < s; r += THREADS) earlier += found[r].taken;
    sum_before(earlier, &total);
    if (threadIdx.x == 0) {
        found[s].base = (int)total;
        if (s == count_of_segments - 1) summary->count = (int)total + found[s].taken;
    }
}

// Write the chosen entries. grid (tiles / WARPS), block (THREADS): one warp for each tile.
//
// out_positions, out_values: (k).
extern "C" __global__ void __launch_bounds__(THREADS) dgc_emit(
    const Segment* __restrict__ segments, const int* __restrict__ tile_segment, const Run* __restrict__ runs,
    const Real* __restrict__ v, const int* __restrict__ positions, const Real* __restrict__ values,
    const Found* __restrict__ found, const u64* __restrict__ sums, int tiles, int* __restrict__ out_positions,
    Real* __restrict__ out_values) {
    const int tile = blockIdx.x * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (tile < tiles && found[tile_segment[tile]].status == CHOSEN && segments[tile_segment[tile]].source != DONE) {
        const int s = tile_segment[tile];
        const Segment& segment = segments[s];
        const u64 key = found[s].low;
        const u32 ties = found[s].want, equal_before = (u32)sums[tile];
        u32 used = equal_before < ties ? equal_before : ties;
        int place = segment.place + (int)(sums[tile] >> 32) + (int)used;
        int n;
        i64 position;
        const Real* const entries = entries_of(segment, tile, runs, v, values, &n, &position);
        const u32 lower = (1u << lane) - 1;
        // All lanes take part in every ballot.
        for (int start = 0; start < n; start += 32) {
            const int i = start + lane;
            const u64 own = i < n ? key_of(entries[i]) : 0;
            const bool above = i < n && own > key, equal = i < n && own == key;
            const u32 equals = __ballot_sync(ALL_LANES, equal);
            const bool chosen = above || (equal && used + __popc(equals & lower) < ties);
            const u32 all = __ballot_sync(ALL_LANES, chosen);
            if (chosen) {
                const int at = place + __popc(all & lower);
                out_positions[at] =
                    segment.source == CANDIDATES ? positions[runs[tile].start + i] : (int)(position + i);
                out_values[at] = entries[i];
            }
            place += __popc(all);
            used += __popc(equals);
            if (used > ties) used = ties;
        }
    }
}
