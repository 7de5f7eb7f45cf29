// What the HIP kernels need of clang: no ROCm header is on the include path.
//
// One function an instruction (or a pattern that becomes one), with the reason why it is written by hand.
#pragma once

#define DEVICE static inline __attribute__((device, always_inline, unused))
#define KERNEL extern "C" __attribute__((global))
#define SHARED __attribute__((shared))

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long u64;
typedef u32 u32x4 __attribute__((ext_vector_type(4)));
typedef float f32x8 __attribute__((ext_vector_type(8)));
typedef _Float16 f16x2 __attribute__((ext_vector_type(2)));
typedef _Float16 f16x8 __attribute__((ext_vector_type(8)));
typedef _Float16 f16x16 __attribute__((ext_vector_type(16)));
typedef __bf16 bf16x2 __attribute__((ext_vector_type(2)));
typedef short i16x8 __attribute__((ext_vector_type(8)));
typedef short i16x16 __attribute__((ext_vector_type(16)));

// A global load of several words needs the alignment of one: rows of any stride keep their 128-bit loads.
typedef u32x4 u32x4_at_word __attribute__((aligned(4)));

constexpr int WAVE = 32;

DEVICE int thread_index() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE int block_index() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE int minimum(int a, int b) { return a < b ? a : b; }
DEVICE int ceil_div(int a, int b) { return (a - 1) / b + 1; }  // a >= 1

// Tells the compiler that all lanes hold the same value, so that addresses made of it stay in scalar registers.
DEVICE int uniform(int value) { return __builtin_amdgcn_readfirstlane(value); }

// A uniform base and an offset of 32 bits a lane: one instruction, with no addition in vector registers before it.
template <typename T>
DEVICE const T* at_byte(const void* base, u32 offset) {
  return reinterpret_cast<const T*>(static_cast<const char*>(base) + offset);
}

// Weights are read once: a non-temporal load does not push activations and scales out of the caches.
DEVICE u32x4 load_once(const u32* base, u32 byte_offset) {
  return __builtin_nontemporal_load(at_byte<u32x4_at_word>(base, byte_offset));
}

// Ends a turn of the ring: what follows in the source is issued after `values` are computed. Without it the compiler
// loads a ring's slot before the last use of what the slot holds, into other registers, and copies them over at the end
// of the loop, or it begins to unpack the next slot early: either way a wait empties the ring.
template <int COUNT>
DEVICE void end_turn(float (&values)[COUNT]) {
  for (float& value : values) asm volatile("" : "+v"(value));
  asm volatile("" ::: "memory");
  __builtin_amdgcn_sched_barrier(0);
}

// The value, with nothing known of it before this point. Conversions of a loaded number are otherwise moved to where it
// was loaded, a turn of the ring earlier, and wait for the load.
DEVICE u16 taken_here(u32 value) {
  asm volatile("" : "+v"(value));
  return u16(value);
}

// A barrier that orders LDS alone: a plain one would also wait for the weight loads in flight.
DEVICE void barrier_for_lds() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup", "local");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup", "local");
}

// The value of the lane whose index differs in the bits of MASK (1, 2, 4, 8: a DPP operand of the instruction that uses
// it; 16: an exchange of the two rows of sixteen lanes). All 32 lanes must be active.
template <int MASK>
DEVICE float from_lane_xor(float value) {
  const int bits = __builtin_bit_cast(int, value);
  if constexpr (MASK == 16)
    return __builtin_bit_cast(float, __builtin_amdgcn_permlanex16(bits, bits, 0x76543210, 0xfedcba98, false, false));
  else
    return __builtin_bit_cast(float, __builtin_amdgcn_update_dpp(0, bits, 0x160 + MASK, 0xf, 0xf, true));
}

// What the launch was: the command processor's own packet (HSA "kernel dispatch packet"). A kernel that plans with
// these figures cannot disagree with its host about how many blocks there are or how much LDS it was given.
struct Launch {
  int blocks;     // in x
  int lds_bytes;  // static and dynamic together
};

template <int THREADS>
DEVICE Launch launch_of_kernel() {
  typedef const __attribute__((address_space(4))) u32* ConstantWords;
  const ConstantWords packet = (ConstantWords)__builtin_amdgcn_dispatch_ptr();
  return Launch{int(packet[3] / THREADS), int(packet[7])};  // grid_size_x in threads, group_segment_size
}
