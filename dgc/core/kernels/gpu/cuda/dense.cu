// Whole tensors: zeroing results, gradients into the vector that is summed densely, momentum SGD, sums of squares.
//
// One launch for all tensors of a bucket: block b works on the tile `tiles[b]` of its tensor.

#define PADDING 16  // tensors begin at multiples of this many elements

// One tensor; what a kernel does not use stays 0.
struct Tensor {
    Real* result;           // (length)
    const void* gradient;   // (length)
    const void* parameter;  // null without weight decay
    i64 u;                  // offset in u
    i64 vector;             // offset in the vector, -1 where there is none
    i64 length;
    double momentum, decay, scale;
    double limit;           // largest magnitude that the result may have
    int gradient_type, parameter_type, form, first_tile;
};

static_assert(sizeof(Tensor) == 96, "the host's table");

__device__ __forceinline__ Tensor tensor_of_block(const Tensor* tensors, const int* tile_tensor, i64* start, i64* stop) {
    const Tensor tensor = tensors[tile_tensor[blockIdx.x]];
    *start = (i64)(blockIdx.x - tensor.first_tile) * TILE;
    *stop = tensor.length - *start < TILE ? tensor.length : *start + TILE;
    return tensor;
}

// vector = gradient * scale, and 0 in the padding behind a tensor; says whether the gradient is finite everywhere.
// grid (tiles), block (THREADS). vector: (size).
extern "C" __global__ void __launch_bounds__(THREADS) dgc_pack(
    const Tensor* __restrict__ tensors, const int* __restrict__ tile_tensor, Real* __restrict__ vector, i64 size,
    Summary* __restrict__ summary) {
    i64 start, stop;
    const Tensor tensor = tensor_of_block(tensors, tile_tensor, &start, &stop);
    const Real scale = (Real)tensor.scale;
    bool bad = false;
    for (i64 i = start + threadIdx.x; i < stop; i += THREADS) {
        const Real x = load_one(tensor.gradient, tensor.gradient_type, i) * scale;
        bad = bad || key_of(x) >= INFINITY_KEY;
        vector[tensor.vector + i] = x;
    }
    const i64 end = (stop + PADDING - 1) / PADDING * PADDING, room = size - tensor.vector;
    if (stop == tensor.length)
        for (i64 i = stop + threadIdx.x; i < end && i < room; i += THREADS) vector[tensor.vector + i] = (Real)0;
    if (bad) summary->nonfinite = 1;
}

// G = mean + decay * parameter; velocity = m * u + G; returns the velocity, or G + m * velocity with Nesterov, scaled.
__device__ __forceinline__ Real momentum_step(
    const Tensor& tensor, i64 i, const Real* vector, const Real* u, Real* velocity) {
    const Real m = (Real)tensor.momentum;
    Real x = vector[tensor.vector + i];
    if (tensor.parameter) x = x + load_one(tensor.parameter, tensor.parameter_type, i) * (Real)tensor.decay;
    if (tensor.form != NO_MOMENTUM) {
        *velocity = u[tensor.u + i] * m + x;
        x = tensor.form == NESTEROV ? x + m * *velocity : *velocity;
    }
    return x * (Real)tensor.scale;
}

// Momentum SGD on the means in `vector`: u = velocity, result = step. grid (tiles), block (THREADS).
extern "C" __global__ void __launch_bounds__(THREADS) dgc_update(
    const Tensor* __restrict__ tensors, const int* __restrict__ tile_tensor, const Real* __restrict__ vector,
    Real* __restrict__ u) {
    i64 start, stop;
    const Tensor tensor = tensor_of_block(tensors, tile_tensor, &start, &stop);
    for (i64 i = start + threadIdx.x; i < stop; i += THREADS) {
        Real velocity;
        const Real step = momentum_step(tensor, i, vector, u, &velocity);
        if (tensor.form != NO_MOMENTUM) u[tensor.u + i] = velocity;
        tensor.result[i] = step;
    }
}

// Whether a result is not finite or beyond its tensor's `limit`: of a sparsified tensor (vector < 0) as it is, of a
// dense one as `update` would write it. Sets summary->nonfinite. grid (tiles), block (THREADS).
extern "C" __global__ void __launch_bounds__(THREADS) dgc_exceeds(
    const Tensor* __restrict__ tensors, const int* __restrict__ tile_tensor, const Real* __restrict__ vector,
    const Real* __restrict__ u, Summary* __restrict__ summary) {
    i64 start, stop;
    const Tensor tensor = tensor_of_block(tensors, tile_tensor, &start, &stop);
    const Real limit = (Real)tensor.limit;
    bool bad = false;
    for (i64 i = start + threadIdx.x; i < stop; i += THREADS) {
        Real velocity;
        const Real x = tensor.vector < 0 ? tensor.result[i] : momentum_step(tensor, i, vector, u, &velocity);
        bad = bad || !(x <= limit && x >= -limit);
    }
    if (bad) summary->nonfinite = 1;
}

// Sum of squares of each tile's finite elements. grid (tiles), block (THREADS). partial: (tiles).
extern "C" __global__ void __launch_bounds__(THREADS) dgc_squares(
    const Tensor* __restrict__ tensors, const int* __restrict__ tile_tensor, double* __restrict__ partial) {
    __shared__ double sums[THREADS];
    i64 start, stop;
    const Tensor tensor = tensor_of_block(tensors, tile_tensor, &start, &stop);
    double sum = 0;
    for (i64 i = start + threadIdx.x; i < stop; i += THREADS) {
        double x;
        if (tensor.gradient_type == FLOAT64)
            x = ((const double*)tensor.gradient)[i];
        else if (tensor.gradient_type == FLOAT32)
            x = ((const float*)tensor.gradient)[i];
        else
            x = (double)load_one(tensor.gradient, tensor.gradient_type, i);
        if (key_of(x) < 0x7ff0000000000000ull) sum += x * x;
    }
    sums[threadIdx.x] = sum;
    for (int half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) partial[blockIdx.x] = sums[0];
}
