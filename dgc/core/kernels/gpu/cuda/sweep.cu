// The pass over memory: momentum correction of a whole bucket, and the entries of |v| that reach their threshold.

// Update the tile's elements and, where a segment's entries come from candidates, append those that reach its key.
//
// grid (tiles), block (THREADS). A tile's candidates lie side by side and in order; where they begin depends on which
// block came first, so later kernels read them tile by tile, and their results do not.
//
// segments: (S). tile_segment: (tiles). u, v: in place. runs: (tiles), positions, values: (room), candidates.
// bins: (S, BINS), zero, receives a histogram of the candidates. found: (S), zero. summary: zero.
extern "C" __global__ void __launch_bounds__(THREADS) dgc_sweep(
    const Segment* __restrict__ segments, const int* __restrict__ tile_segment, Real* __restrict__ u,
    Real* __restrict__ v, Run* __restrict__ runs, int* __restrict__ positions, Real* __restrict__ values,
    u32* __restrict__ bins, Found* __restrict__ found, Summary* __restrict__ summary) {
    __shared__ int first;
    const int tile = blockIdx.x, s = tile_segment[tile];
    const Segment segment = segments[s];
    const int start = (tile - segment.first_tile) * TILE;
    const int stop = segment.length - start < TILE ? segment.length : start + TILE;
    const Real m = (Real)segment.momentum, decay = (Real)segment.decay, scale = (Real)segment.scale;
    Real* const own_u = u + segment.offset;
    Real* const own_v = v + segment.offset;
    Real y[4][4];
    u32 hits[4];
    u64 counts = 0;  // of each quarter of the tile, 16 bits apart
    bool bad = false;

#pragma unroll
    for (int q = 0; q < 4; q++) {
        const int i = start + q * (TILE / 4) + threadIdx.x * 4;
        const int here = stop - i < 0 ? 0 : stop - i < 4 ? stop - i : 4;
        Real g[4], p[4], velocity[4] = {};
        if (here == 4) {
            load_four(segment.gradient, segment.gradient_type, i, g);
            if (segment.parameter) load_four(segment.parameter, segment.parameter_type, i, p);
            if (segment.form != NO_MOMENTUM) load_four(own_u, STATE_TYPE, i, velocity);
            load_four(own_v, STATE_TYPE, i, y[q]);
        } else {
            for (int j = 0; j < 4; j++) {
                if (j >= here) continue;
                g[j] = load_one(segment.gradient, segment.gradient_type, i + j);
                if (segment.parameter) p[j] = load_one(segment.parameter, segment.parameter_type, i + j);
                if (segment.form != NO_MOMENTUM) velocity[j] = own_u[i + j];
                y[q][j] = own_v[i + j];
            }
        }
        hits[q] = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (j >= here) continue;
            Real x = g[j] * scale;
            if (segment.parameter) x += p[j] * decay;
            if (key_of(x) >= INFINITY_KEY) {
                bad = true;
                x = (Real)0;
            }
            const Real old_y = y[q][j], old_velocity = velocity[j];
            if (segment.form == NO_MOMENTUM) {
                y[q][j] += x;
            } else {
                velocity[j] = m * velocity[j] + x;
                y[q][j] += segment.form == NESTEROV ? x + m * velocity[j] : velocity[j];
            }
            if (key_of(y[q][j]) >= INFINITY_KEY) {  // of finite values: u and v stay what they were
                bad = true;
                y[q][j] = old_y;
                velocity[j] = old_velocity;
            }
            if (key_of(y[q][j]) >= segment.key) hits[q] |= 1u << j;
        }
        if (here == 4) {
            if (segment.form != NO_MOMENTUM) store_four(own_u, i, velocity);
            store_four(own_v, i, y[q]);
        } else {
            for (int j = 0; j < 4; j++) {
                if (j >= here) continue;
                if (segment.form != NO_MOMENTUM) own_u[i + j] = velocity[j];
                own_v[i + j] = y[q][j];
            }
        }
        counts |= (u64)__popc(hits[q]) << 16 * q;
    }
    if (bad) summary->nonfinite = 1;
    if (segment.source != CANDIDATES) return;

    if (!__syncthreads_or(counts != 0)) {
        if (threadIdx.x == 0) runs[tile].start = runs[tile].count = 0;
        return;
    }
    u64 totals;
    const u64 before = sum_before(counts, &totals);
    const int count = (int)((totals & 0xffff) + (totals >> 16 & 0xffff) + (totals >> 32 & 0xffff) + (totals >> 48));
    if (threadIdx.x == 0) {
        const int at = atomicAdd(&found[s].total, count);
        // Candidates that find no room are only counted: the segment is searched as a whole then.
        const bool fits = at <= segment.most - count;
        first = fits ? segment.room + at : -1;
        runs[tile].start = segment.room + (fits ? at : 0);
        runs[tile].count = fits ? count : 0;
    }
    __syncthreads();
    if (first < 0) return;
    int place = first;
    const u64 low = segment.open ? segment.key : 0;
    const int shift = segment.open ? NEAR_SHIFT : FAR_SHIFT;
#pragma unroll
    for (int q = 0; q < 4; q++) {
        const int i = start + q * (TILE / 4) + threadIdx.x * 4;
        int at = place + (int)(before >> 16 * q & 0xffff);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if (!(hits[q] >> j & 1)) continue;
            positions[at] = (int)(segment.offset + i + j);
            values[at] = y[q][j];
            at++;
            const u64 bin = (key_of(y[q][j]) - low) >> shift;
            atomicAdd(&bins[(i64)s * BINS + (bin < BINS ? bin : BINS - 1)], 1u);
        }
        place += (int)(totals >> 16 * q & 0xffff);
    }
}
