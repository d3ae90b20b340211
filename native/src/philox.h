// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).
#pragma once

#include <cstdint>

namespace raymoe {
namespace {

constexpr uint32_t kPhiloxM0 = 0xd2511f53u, kPhiloxM1 = 0xcd9e8d57u;
constexpr uint32_t kPhiloxW0 = 0x9e3779b9u, kPhiloxW1 = 0xbb67ae85u;
constexpr int kPhiloxRounds = 10;

struct Words {
  uint32_t word[4];
};

inline Words philox(Words counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < kPhiloxRounds; ++round) {
    const uint64_t product0 = static_cast<uint64_t>(kPhiloxM0) * counter.word[0];
    const uint64_t product1 = static_cast<uint64_t>(kPhiloxM1) * counter.word[2];
    counter = Words{{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0,
                     static_cast<uint32_t>(product1),
                     static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1,
                     static_cast<uint32_t>(product0)}};
    key0 += kPhiloxW0;
    key1 += kPhiloxW1;
  }
  return counter;
}

}  // namespace
}  // namespace raymoe
