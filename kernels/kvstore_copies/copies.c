/* Copies rows of memory in one pass, on as many threads as call it.
 *
 * A batch is an array of 64-bit words that the Python side makes: its header, its blocks, and their addresses. The copies
 * of a block are alike: from the source to the target at its place, over at most three axes of rows, and each row is in
 * one piece. The work is cut into slices, a slice being what lies at one index of the outermost axis; threads take some
 * at a time. */
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { AXES = 3, AHEAD = 512, LONG_ROW = 4096 };

typedef struct {
    uint64_t targets, sources; /* the words of the batch where their addresses begin */
    uint64_t first_slice;      /* the slices of the blocks before this one */
    uint64_t sizes[AXES];
    int64_t target_steps[AXES], source_steps[AXES]; /* in bytes */
    uint64_t row_bytes;
} block;

typedef struct {
    uint64_t next; /* the first slice that no thread has taken */
    uint64_t slice_count;
    uint64_t slices_at_once;
    uint64_t streams; /* 1: write past the processor's caches */
    uint64_t block_count;
    block blocks[];
} batch;

/* A store that misses the caches reads the line first. Where much is copied none of it would stay in them, and streaming
 * stores save that read: a third of what the memory has to do. The source comes by a way past the last cache, too, so
 * that what others have there stays: after a copy the engine's and the service's next steps run from it. */
static void copy_row(char *target, const char *source, uint64_t count, uint64_t streams)
{
#if defined(__SSE2__)
    if (streams && count >= 128) {
        uint64_t head = -(uintptr_t)target & 63;
        memcpy(target, source, head);
        target += head, source += head, count -= head;
        int is_long = count >= LONG_ROW; /* what lies behind a short row may belong to no row */
        for (; count >= 64; target += 64, source += 64, count -= 64) {
            if (is_long)
                _mm_prefetch(source + AHEAD, _MM_HINT_NTA);
            __m128i a = _mm_loadu_si128((const __m128i *)source), b = _mm_loadu_si128((const __m128i *)source + 1);
            __m128i c = _mm_loadu_si128((const __m128i *)source + 2), d = _mm_loadu_si128((const __m128i *)source + 3);
            _mm_stream_si128((__m128i *)target, a), _mm_stream_si128((__m128i *)target + 1, b);
            _mm_stream_si128((__m128i *)target + 2, c), _mm_stream_si128((__m128i *)target + 3, d);
        }
    }
#else
    (void)streams;
#endif
    switch (count) { /* the lengths of a head's numbers for one token: known, so that no call is made */
    case 64: memcpy(target, source, 64); break;
    case 128: memcpy(target, source, 128); break;
    case 256: memcpy(target, source, 256); break;
    case 512: memcpy(target, source, 512); break;
    default: memcpy(target, source, count);
    }
}

static void copy_slice(const batch *all, const block *each, uint64_t slice)
{
    const uint64_t *words = (const uint64_t *)all;
    uint64_t number = slice / each->sizes[0], place = slice % each->sizes[0];
    char *target = (char *)(uintptr_t)words[each->targets + number] + (int64_t)place * each->target_steps[0];
    const char *source = (const char *)(uintptr_t)words[each->sources + number];
    source += (int64_t)place * each->source_steps[0];
    for (uint64_t i = 0; i < each->sizes[1]; i++, target += each->target_steps[1], source += each->source_steps[1]) {
        char *to = target;
        const char *from = source;
        for (uint64_t j = 0; j < each->sizes[2]; j++, to += each->target_steps[2], from += each->source_steps[2])
            copy_row(to, from, each->row_bytes, all->streams);
    }
}

static const block *block_of(const batch *all, uint64_t slice)
{
    uint64_t first = 0, stop = all->block_count;
    while (stop - first > 1) {
        uint64_t middle = first + (stop - first) / 2;
        if (all->blocks[middle].first_slice <= slice)
            first = middle;
        else
            stop = middle;
    }
    return &all->blocks[first];
}

/* Copy slices that no other thread has taken: all that are left, or ``most`` of them. The number in the name is that of
 * the words: an older library does not read a newer batch. */
void kvstore_copy_1(batch *all, uint64_t most)
{
    while (most) {
        uint64_t count = all->slices_at_once < most ? all->slices_at_once : most;
        uint64_t slice = __atomic_fetch_add(&all->next, count, __ATOMIC_RELAXED), stop = slice + count;
        if (slice >= all->slice_count)
            break;
        most -= count;
        if (stop > all->slice_count)
            stop = all->slice_count;
        const block *each = block_of(all, slice), *end = all->blocks + all->block_count;
        for (; slice < stop; slice++) {
            while (each + 1 < end && each[1].first_slice <= slice)
                each++;
            copy_slice(all, each, slice - each->first_slice);
        }
    }
#if defined(__SSE2__)
    _mm_sfence(); /* streaming stores are not ordered with what this thread does next */
#endif
}
