// k8x_mma.h for a test.
#include "ptx.h"  // of this folder, before the one of k8x_mma.h

#include "k8x_mma.h"

// For `count` zero points, an even number, and each q, at all eight places of a word, in units of 1: q less the zero
// point by unpack(), what is lost of the zero point, q or q - 8 by unpack_for_scaling(), and from there q less the zero
// point.
extern "C" void unpack_all(
    const u16 *z, int count, float (*unpacked)[16][8], float *lost, float (*for_scaling)[8], float (*less_z)[16][8]) {
    for (int i = 0; i < count; i += 2) {
        u32 both_lost;
        const u32 minus = minus_zero_points(z[i] | u32(z[i + 1]) << 16, both_lost);
        for (int e = 0; e < 2; ++e) {
            lost[i + e] = to_float(both_lost >> 16 * e);
            for (u32 q = 0; q < 16; ++q) {
                u32 pair[4], scaling[4];
                unpack(q * 0x11111111, e ? twice_high(minus) : twice_low(minus), pair);
                unpack_for_scaling(q * 0x11111111, scaling);
                for (int k = 0; k < 8; ++k) {
                    const int bit = 16 * (k % 2);
                    unpacked[i + e][q][k] = WEIGHT_UNIT * to_float(pair[k / 2] >> bit);
                    for_scaling[q][k] = SCALING_UNIT * to_float(scaling[k / 2] >> bit);
                    less_z[i + e][q][k] = to_float(subtract_zero_point(scaling[k / 2], twice_low(z[i + e])) >> bit);
                }
            }
        }
    }
}
