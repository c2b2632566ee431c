// Exactly the k largest of each segment, ties to the lower position, in ascending order.
//
// sweep -> locate -> (refine -> locate) until every k-th largest key is known -> count -> scan -> emit. A kernel looks
// at nothing that a block of its own launch wrote, except through atomic additions whose order does not matter.

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

// Judge the candidates (`begin`), or take the next step of the search. grid (S), block (THREADS).
//
// bins: (S, BINS), zero again afterwards.
extern "C" __global__ void __launch_bounds__(THREADS) dgc_locate(
    const Segment* __restrict__ segments, u32* __restrict__ bins, Found* __restrict__ found,
    Summary* __restrict__ summary, int begin) {
    const int s = blockIdx.x;
    const Segment segment = segments[s];
    u32* const own = bins + (i64)s * BINS;
    Found state = found[s];
    if (begin && segment.source == WHOLE) {
        state.low = 0;
        state.width = KEY_BITS;
        state.want = segment.k;
    } else if (begin) {
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
    } else if (state.width > 0 && state.status == CHOSEN) {
        const int shift = state.width > BIN_BITS ? state.width - BIN_BITS : 0;
        u32 left;
        const int bin = descend(own, state.want, &left);
        state.low += (u64)bin << shift;
        state.width = shift;
        state.want = left;
        if (shift == 0) conclude(segment, state);
    } else {
        return;
    }
    __syncthreads();  // all threads have read found[s]
    if (threadIdx.x == 0) {
        found[s] = state;
        if (state.status != CHOSEN) summary->unfinished = 1;
    }
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
    const u64 low = found[s].low;
    const int width = found[s].width;
    if (width == 0 || found[s].status != CHOSEN) return;
    const int shift = width > BIN_BITS ? width - BIN_BITS : 0;
    u32* const own = bins + (i64)s * BINS;
    const int part = (tile - segment.first_tile) / SPAN;
    if (segment.source == CANDIDATES) {
        const int parts = (segment.tiles + SPAN - 1) / SPAN, total = found[s].total;
        for (i64 i = part * THREADS + threadIdx.x; i < total; i += (i64)parts * THREADS) {
            const u64 key = key_of(values[segment.room + i]);
            if (key >= low && (key - low) >> width == 0) atomicAdd(&own[(key - low) >> shift], 1u);
        }
        return;
    }
    for (int i = threadIdx.x; i < BINS; i += THREADS) tally[i] = 0;
    __syncthreads();
    const i64 start = (i64)part * SPAN * TILE;
    const i64 stop = segment.length - start < SPAN * TILE ? segment.length : start + SPAN * TILE;
    for (i64 i = start + threadIdx.x; i < stop; i += THREADS) {
        const u64 key = key_of(v[segment.offset + i]);
        if (key >= low && (key - low) >> width == 0) atomicAdd(&tally[(key - low) >> shift], 1u);
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
// largest magnitude: the threshold control learns from it how steeply their number falls.
// grid (tiles / WARPS), block (THREADS): one warp for each tile.
extern "C" __global__ void __launch_bounds__(THREADS) dgc_count(
    const Segment* __restrict__ segments, const int* __restrict__ tile_segment, const Run* __restrict__ runs,
    const Real* __restrict__ v, const Real* __restrict__ values, Found* found, u64* __restrict__ sums, int tiles,
    double wider) {
    const int tile = blockIdx.x * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (tile >= tiles) return;
    const int s = tile_segment[tile];
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
    const int first = segments[s].first_tile, tiles = segments[s].tiles;
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
    Real* __restrict__ out_values, Summary* __restrict__ summary) {
    __shared__ u64 largest;
    if (threadIdx.x == 0) largest = 0;
    __syncthreads();
    const int tile = blockIdx.x * WARPS + (threadIdx.x >> 5), lane = threadIdx.x & 31;
    if (tile < tiles && found[tile_segment[tile]].status == CHOSEN) {
        const int s = tile_segment[tile];
        const Segment& segment = segments[s];
        const u64 key = found[s].low;
        const u32 ties = found[s].want, equal_before = (u32)sums[tile];
        u32 used = equal_before < ties ? equal_before : ties;
        int place = found[s].base + (int)(sums[tile] >> 32) + (int)used;
        int n;
        i64 position;
        const Real* const entries = entries_of(segment, tile, runs, v, values, &n, &position);
        const u32 lower = (1u << lane) - 1;
        u64 mine = 0;
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
                if (own > mine) mine = own;
            }
            place += __popc(all);
            used += __popc(equals);
            if (used > ties) used = ties;
        }
        if (mine) atomicMax(&largest, mine);
    }
    __syncthreads();
    if (threadIdx.x == 0 && largest) atomicMax(&summary->largest, largest);
}
