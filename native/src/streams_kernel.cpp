// Streams of hidden states, written once on vec_f32.h.
#include "raymoe/streams.h"
#include "vec_f32.h"

namespace raymoe {
namespace {

/// magnitude * sigmoid(logits) of one token.
inline void factors_of(const float* logits, int64_t count, float magnitude, float* factors) {
  for (int64_t i = 0; i < count; ++i)
    factors[i] = magnitude / (1.0f + __builtin_expf(-logits[i]));
}

template <typename T>
void logits_rows(const StreamLogits& args, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const T* hidden = static_cast<const T*>(args.hidden) + row * args.hidden_stride;
    const F32 factor = splat(inverse_rms(hidden, args.size, args.eps));
    float* logits = args.logits + row * args.logits_stride;
    for_lanes(args.num_factors, [&](int64_t i, auto part) {
      const F32 normed = mul(load(logits + i, part), factor);
      const F32 scaled = mul(normed, load(args.scale + i, part));
      store(logits + i, add(scaled, load(args.base + i, part)), part);
    });
  }
}

template <typename T>
void read_rows(const StreamRead& args, int64_t begin, int64_t end) {
  float factors[kMaxStreams];
  for (int64_t row = begin; row < end; ++row) {
    const T* hidden = static_cast<const T*>(args.hidden) + row * args.hidden_stride;
    T* out = static_cast<T*>(args.out) + row * args.out_stride;
    factors_of(args.logits + row * args.logits_stride, args.count, 1.0f, factors);
    for (int64_t s = 0; s < args.count; ++s) factors[s] += args.eps;
    for_lanes(args.size, [&](int64_t i, auto part) {
      F32 sum = mul(splat(factors[0]), load(hidden + i, part));
      for (int64_t s = 1; s < args.count; ++s)
        sum = add(sum, mul(splat(factors[s]), load(hidden + s * args.size + i, part)));
      store(out + i, sum, part);
    });
  }
}

template <typename T>
void read_gated_rows(const GatedStreamRead& args, int64_t begin, int64_t end) {
  const F32 count = splat(static_cast<float>(args.count));
  for (int64_t row = begin; row < end; ++row) {
    const T* normed = static_cast<const T*>(args.normed) + row * args.normed_stride;
    const T* gates = static_cast<const T*>(args.gates) + row * args.gates_stride;
    T* out = static_cast<T*>(args.out) + row * args.out_stride;
    for_lanes(args.size, [&](int64_t i, auto part) {
      F32 sum = splat(0.0f);
      for (int64_t s = 0; s < args.count; ++s) {
        const int64_t place = s * args.size + i;
        sum = add(sum, mul(sigmoid_of(load(gates + place, part)), load(normed + place, part)));
      }
      store(out + i, div(sum, count), part);
    });
  }
}

/// The matrices of tokens, one per lane: element [j][k] of all of them is one vector.
struct LaneMatrices {
  F32 elements[kMaxStreams][kMaxStreams];
  int64_t count;

  void softmax_rows(F32 eps) {
    for (int64_t j = 0; j < count; ++j) {
      F32 largest = elements[j][0], sum = splat(0.0f);
      for (int64_t k = 1; k < count; ++k) largest = max(largest, elements[j][k]);
      for (int64_t k = 0; k < count; ++k) {
        elements[j][k] = exp_of(sub(elements[j][k], largest));
        sum = add(sum, elements[j][k]);
      }
      for (int64_t k = 0; k < count; ++k) elements[j][k] = add(div(elements[j][k], sum), eps);
    }
  }
  void divide_rows(F32 eps) {
    for (int64_t j = 0; j < count; ++j) {
      F32 sum = elements[j][0];
      for (int64_t k = 1; k < count; ++k) sum = add(sum, elements[j][k]);
      sum = add(sum, eps);
      for (int64_t k = 0; k < count; ++k) elements[j][k] = div(elements[j][k], sum);
    }
  }
  void divide_columns(F32 eps) {
    for (int64_t k = 0; k < count; ++k) {
      F32 sum = elements[0][k];
      for (int64_t j = 1; j < count; ++j) sum = add(sum, elements[j][k]);
      sum = add(sum, eps);
      for (int64_t j = 0; j < count; ++j) elements[j][k] = div(elements[j][k], sum);
    }
  }
};

/// Calls body(j, k, lanes) with room for element [j][k] of all lanes.
template <typename Body>
inline void for_elements(LaneMatrices& matrices, const Body& body) {
  float lanes[kLanes] = {};
  for (int64_t j = 0; j < matrices.count; ++j)
    for (int64_t k = 0; k < matrices.count; ++k) {
      store(lanes, matrices.elements[j][k], Whole{});
      body(j * matrices.count + k, lanes);
      matrices.elements[j][k] = load(lanes, Whole{});
    }
}

void mixing_matrices_rows(const MixingMatrices& args, int64_t begin, int64_t end) {
  const F32 eps = splat(args.eps);
  const int64_t size = args.count * args.count;
  for (int64_t first = begin; first < end; first += kLanes) {
    const int64_t tokens = end - first < kLanes ? end - first : kLanes;
    LaneMatrices matrices;
    matrices.count = args.count;
    for (auto& row : matrices.elements)
      for (F32& element : row) element = splat(0.0f);
    for_elements(matrices, [&](int64_t element, float* lanes) {
      for (int64_t t = 0; t < tokens; ++t)
        lanes[t] = args.logits[(first + t) * args.logits_stride + element];
    });
    matrices.softmax_rows(eps);
    matrices.divide_columns(eps);
    for (int64_t i = 1; i < args.iterations; ++i) {
      matrices.divide_rows(eps);
      matrices.divide_columns(eps);
    }
    for_elements(matrices, [&](int64_t element, float* lanes) {
      for (int64_t t = 0; t < tokens; ++t) args.out[(first + t) * size + element] = lanes[t];
    });
  }
}

/// Rounded matrix and factors of one token.
template <typename T>
struct Mixing {
  F32 post[kMaxStreams];
  F32 matrix[kMaxStreams][kMaxStreams];
};

template <typename T, typename Lanes>
inline void mix_columns(const StreamAdd& args, const Mixing<T>& mixing, F32 delta, T* hidden,
                        Lanes part) {
  const int64_t count = args.count, size = args.size;
  F32 streams[kMaxStreams];
  for (int64_t j = 0; j < count; ++j) streams[j] = load(hidden + j * size, part);
  for (int64_t k = 0; k < count; ++k) {
    F32 mixed = splat(0.0f);
    for (int64_t j = 0; j < count; ++j) mixed = add(mixed, mul(mixing.matrix[j][k], streams[j]));
    const F32 added = rounded_to<T>(mul(mixing.post[k], delta));
    store(hidden + k * size, add(added, rounded_to<T>(mixed)), part);
  }
}

template <typename T>
void add_rows(const StreamAdd& args, int64_t begin, int64_t end) {
  float post[kMaxStreams];
  Mixing<T> mixing;
  const int64_t count = args.count;
  for (int64_t row = begin; row < end; ++row) {
    T* hidden = static_cast<T*>(args.hidden) + row * args.hidden_stride;
    const T* delta = static_cast<const T*>(args.delta) + row * args.delta_stride;
    factors_of(args.logits + row * args.logits_stride, count, args.magnitude, post);
    if (args.matrices == nullptr) {
      for (int64_t k = 0; k < count; ++k)
        for_lanes(args.size, [&](int64_t i, auto part) {
          const F32 added = mul(splat(post[k] + args.eps), load(delta + i, part));
          T* stream = hidden + k * args.size + i;
          store(stream, add(added, load(stream, part)), part);
        });
      continue;
    }
    const float* matrix = args.matrices + row * count * count;
    for (int64_t j = 0; j < count; ++j) {
      mixing.post[j] = rounded_to<T>(splat(post[j]));
      for (int64_t k = 0; k < count; ++k)
        mixing.matrix[j][k] = rounded_to<T>(splat(matrix[j * count + k]));
    }
    for_lanes(args.size, [&](int64_t i, auto part) {
      mix_columns(args, mixing, load(delta + i, part), hidden + i, part);
    });
  }
}

}  // namespace

RAYMOE_DEFINE_KERNELS(StreamKernels, stream_kernels) = {
    RAYMOE_FLOAT_KERNELS(logits_rows), RAYMOE_FLOAT_KERNELS(read_rows),
    RAYMOE_FLOAT_KERNELS(read_gated_rows), RAYMOE_FLOAT_KERNELS(add_rows), mixing_matrices_rows};

}  // namespace raymoe
