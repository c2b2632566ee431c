// Work at k places given as a list, for messages that the host writes and reads.

// v[position] -= decoded, and with masking u[position] = 0. grid (any), block (THREADS).
extern "C" __global__ void __launch_bounds__(THREADS) dgc_mask(
    Real* __restrict__ u, Real* __restrict__ v, const i64* __restrict__ positions,
    const Real* __restrict__ decoded, i64 k, int masking) {
    for (i64 i = (i64)blockIdx.x * THREADS + threadIdx.x; i < k; i += (i64)gridDim.x * THREADS) {
        const i64 p = positions[i];
        v[p] = v[p] - decoded[i];
        if (masking) u[p] = (Real)0;
    }
}
