/*
 * Sets of numbers: a bit for each, and above these, level by level up to a single word, a bit for each word that is not zero. So whatever is
 * asked looks at a word or two of each level.
 */
#include "spw_base.h"

enum { WORD = 64 };

spw_status
spw_set_init(spw_set *set, uint64_t bound, spw_error *err)
{
    uint64_t words = 0, at = 0;
    *set = (spw_set){.bound = bound};
    SPW_ASSERT(bound <= 1ull << 36); /* SPW_SET_LEVELS of 6 bits each */
    for (uint64_t n = bound; set->level_count == 0 || n > 1; set->level_count++) {
        n = n / WORD + 1;
        set->word_count[set->level_count] = n;
        words += n;
    }
    set->words = spw_mem_calloc(words, sizeof *set->words);
    if (set->words == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "set of numbers below %llu", (unsigned long long)bound);
    for (uint32_t l = 0; l < set->level_count; l++) {
        set->level[l] = set->words + at;
        at += set->word_count[l];
    }
    return SPW_OK;
}

void
spw_set_deinit(spw_set *set)
{
    spw_mem_free(set->words);
    *set = (spw_set){.bound = 0};
}

void
spw_set_add(spw_set *set, uint64_t n)
{
    SPW_ASSERT(n < set->bound);
    for (uint32_t l = 0; l < set->level_count; l++, n /= WORD) {
        uint64_t *word = &set->level[l][n / WORD], before = *word;
        *word |= 1ull << n % WORD;
        if (before != 0)
            return; /* those above know */
    }
}

void
spw_set_remove(spw_set *set, uint64_t n)
{
    SPW_ASSERT(n < set->bound);
    for (uint32_t l = 0; l < set->level_count; l++, n /= WORD) {
        uint64_t *word = &set->level[l][n / WORD];
        *word &= ~(1ull << n % WORD);
        if (*word != 0)
            return;
    }
}

bool
spw_set_has(const spw_set *set, uint64_t n)
{
    SPW_ASSERT(n < set->bound);
    return (set->level[0][n / WORD] >> n % WORD & 1) != 0;
}

uint64_t
spw_set_next(const spw_set *set, uint64_t from)
{
    for (uint32_t l = 0; l < set->level_count; l++) {
        const uint64_t word = from / WORD;
        const uint64_t bits = word < set->word_count[l] ? set->level[l][word] & ~0ull << from % WORD : 0;
        if (bits == 0) {
            from = word + 1;
            continue;
        }
        from = word * WORD + (uint64_t)__builtin_ctzll(bits);
        while (l-- > 0)
            from = from * WORD + (uint64_t)__builtin_ctzll(set->level[l][from]);
        return from;
    }
    return UINT64_MAX;
}

uint64_t
spw_set_last(const spw_set *set, uint64_t end)
{
    end = end < set->bound ? end : set->bound;
    for (uint32_t l = 0; l < set->level_count && end > 0; l++) {
        const uint64_t word = (end - 1) / WORD, bits = set->level[l][word] & ~0ull >> (WORD - 1 - (end - 1) % WORD);
        if (bits == 0) {
            end = word;
            continue;
        }
        end = word * WORD + WORD - 1 - (uint64_t)__builtin_clzll(bits);
        while (l-- > 0)
            end = end * WORD + WORD - 1 - (uint64_t)__builtin_clzll(set->level[l][end]);
        return end;
    }
    return UINT64_MAX;
}
