// take_apart(), unpack() and subtract() of k8x_mma.h for a test.
#include "ptx.h"

#include "../../csrc/include/k8x_mma.h"

// For `count` zero points, an even number: rest[i], q - near as unpacking gives it, in units of 1, and q - z, from
// which the rest is subtracted; `odd`: at positions 1 and 3, else at 0 and 2.
extern "C" void apart(
    const u16 *z, int count, int odd, float *rest, float (*q_less_near)[16], float (*q_less_z)[16]) {
    for (int i = 0; i < count; i += 2) {
        u32 minus[2], rests;
        take_apart(z[i] | u32(z[i + 1]) << 16, minus, rests);
        for (int e = 0; e < 2; ++e) {
            rest[i + e] = to_float(rests >> 16 * e);
            for (u32 q = 0; q < 16; ++q) {
                u32 pair[4];
                unpack(q * 0x11111111, minus[e], pair);
                const u32 of_q = odd ? pair[1] >> 16 : pair[0];
                q_less_near[i + e][q] = WEIGHT_UNIT * to_float(of_q);
                q_less_z[i + e][q] = to_float(subtract(of_q, rests >> 16 * e));
            }
        }
    }
}
