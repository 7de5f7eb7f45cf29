// out[row] = dot(a[row], b), fp16 with fp32 sums; one block a row. For tests of the emulator: v_dot2, DPP, permlanex16, LDS, a
// barrier, and dynamic LDS.

#define KERNEL extern "C" __attribute__((global))
#define SHARED __attribute__((shared))
typedef _Float16 half2 __attribute__((ext_vector_type(2)));

template <int MASK>
static inline __attribute__((device)) float from_lane_xor(float value) {
  const int bits = __builtin_bit_cast(int, value);
  if constexpr (MASK == 16)
    return __builtin_bit_cast(float, __builtin_amdgcn_permlanex16(bits, bits, 0x76543210, 0xfedcba98, false, false));
  else
    return __builtin_bit_cast(float, __builtin_amdgcn_update_dpp(bits, bits, 0x160 + MASK, 0xf, 0xf, false));
}

KERNEL __attribute__((amdgpu_flat_work_group_size(128, 128)))
void dot_reduce(const half2* a, const half2* b, float* out, int pairs) {
  extern SHARED float partial[];
  const int thread = __builtin_amdgcn_workitem_id_x();
  const long row = __builtin_amdgcn_workgroup_id_x();
  float sum = 0;
  for (int i = thread; i < pairs; i += 128) sum = __builtin_amdgcn_fdot2(a[row * pairs + i], b[i], sum, false);
  sum += from_lane_xor<1>(sum);
  sum += from_lane_xor<2>(sum);
  sum += from_lane_xor<4>(sum);
  sum += from_lane_xor<8>(sum);
  sum += from_lane_xor<16>(sum);
  if (thread % 32 == 0) partial[thread / 32] = sum;
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
  if (thread == 0) out[row] = partial[0] + partial[1] + partial[2] + partial[3];
}
