// `consume` for numbers that the matrix units read from shared memory: 16-bit ones and e4m3.

DEVICE void consume(float (&sums)[SUMS], const Arguments& a, Ring w, Ring x, u32 begin, u32 end) {
    const u32 warpgroup = threadIdx.x / 128, lane = threadIdx.x % 32;
    u32 w_before = 0, x_before = 0;
    for (u32 step = begin; step < end; ++step) {
        wait_for(w.when_full(), w.phase);
        wait_for(x.when_full(), x.phase);
        begin_products();
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
            multiply(sums, tile_descriptor(w.tile() + warpgroup * 64 * 128) + 2 * i, tile_descriptor(x.tile()) + 2 * i,
                     step > begin || i > 0);
        end_products();
        if (step > begin) {
            wait_for_products<1>();
            release(w_before, lane);
            release(x_before, lane);
        }
        w_before = w.when_empty(), x_before = x.when_empty();
        w.advance(), x.advance();
    }
    wait_for_products<0>();
    // The rings are not filled again.
}
