// Work at k places given as a list, for messages that the host writes and reads.

// kept_u, kept_v: what is at the places; then v -= decoded, and with masking u = 0. grid (any), block (THREADS).
extern "C" __global__ void __launch_bounds__(THREADS) dgc_mask(
    Real* __restrict__ u, Real* __restrict__ v, const i64* __restrict__ positions, const Real* __restrict__ decoded,
    i64 k, int masking, Real* __restrict__ kept_u, Real* __restrict__ kept_v) {
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < k; i += (i64)gridDim.x * THREADS) {
        const i64 p = positions[i];
        kept_u[i] = u[p];
        kept_v[i] = v[p];
        v[p] = v[p] - decoded[i];
        if (masking) u[p] = (Real)0;
    }
}

// Put back what was kept. positions: (k) of int32, as the selection writes them, or int64.
extern "C" __global__ void __launch_bounds__(THREADS) dgc_restore(
    Real* __restrict__ u, Real* __restrict__ v, const void* __restrict__ positions, int wide,
    const Real* __restrict__ kept_u, const Real* __restrict__ kept_v, i64 k) {
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < k; i += (i64)gridDim.x * THREADS) {
        const i64 p = wide ? ((const i64*)positions)[i] : ((const int*)positions)[i];
        u[p] = kept_u[i];
        v[p] = kept_v[i];
    }
}

// results[position] += value * factor. targets: (S).
extern "C" __global__ void __launch_bounds__(THREADS) dgc_scatter_add(
    const Target* __restrict__ targets, int segments, const i64* __restrict__ positions,
    const Real* __restrict__ values, double factor, i64 k) {
    const Real share = (Real)factor;
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < k; i += (i64)gridDim.x * THREADS)
        add_at(targets, segments, positions[i], values[i] * share);
}
