/* Launches choice.cuh, and puts new keys into the cache before. */
#include "choice.cuh"
#include "cuda_internal.h"
#include "rows.cuh"

template <class E>
static choice_args<E>
args_of(const spw_choice_shape *s, const act *query, const act *key, const act *weights, float *scratch)
{
    choice_args<E> args;
    memset(&args, 0, sizeof args);
    args.at.T = s->T;
    args.at.first = s->first;
    args.at.capacity = s->capacity;
    args.at.keys = s->keys;
    args.at.each = s->each;
    args.at.key_rows = s->key_rows;
    args.at.words = s->words;
    args.at.begins = s->begins;
    args.at.slots = s->slots;
    args.at.starts = s->starts;
    args.q = (const E *)query;
    args.key = (const E *)key;
    args.weights = (const E *)weights;
    args.scores = scratch;
    args.H = (int)s->H;
    args.D = (int)s->D;
    args.wide = s->D % 8 == 0 && spw__cuda_aligned(query, key);
    return args;
}

static void
launch_scores(cuda_queue *q, const choice_args<float> &args, uint64_t B)
{
    dim3 grid(spw__cuda_blocks(args.at.words * 32, CHOICE_F32_TILE), spw__cuda_blocks(args.at.T, CHOICE_F32_TILE),
              (unsigned)B);
    LAUNCH(q, grid, CHOICE_F32_THREADS, (size_t)(2 * CHOICE_F32_TILE * (args.D + 1)) * sizeof(float),
           (choice_scores_f32_kernel), args);
}

template <class E>
static void
launch_scores(cuda_queue *q, const choice_args<E> &args, uint64_t B)
{
    dim3 grid(spw__cuda_blocks(args.at.words * 32, CHOICE_TILE), spw__cuda_blocks(args.at.T, CHOICE_TILE), (unsigned)B);
    LAUNCH(q, grid, CHOICE_THREADS, choice_shared_bytes(), (choice_scores_kernel<E>), args);
}

/* Row t of sequence b to its place in the cache. */
template <class E>
static void
put(cuda_queue *q, E *cache, const E *rows, const spw_choice_shape *s)
{
    LAUNCH(q, (unsigned)(s->B * s->T), 128, 0, (put_rows_kernel<E>), cache + s->first * s->D, rows, s->slots, s->starts,
           s->capacity, s->T, s->D, 1, s->D, s->D);
}

void
spw__cuda_choose_keys(spw_gpu_queue *queue, uint32_t *bits, const act *query, act *key, const act *new_key,
                      const act *weights, float *scratch, const spw_choice_shape *s)
{
    cuda_queue *q = spw__cuda_queue_of(queue);
    if (s->B == 0 || s->T == 0)
        return;
    if (new_key != NULL)
        BY_TYPE(q, put<T>(q, (T *)key, (const T *)new_key, s));
    BY_TYPE(q, launch_scores(q, args_of<T>(s, query, key, weights, scratch), s->B));
    LAUNCH(q, (unsigned)(s->B * s->T), PICK_THREADS, 0, (choice_pick_kernel), bits, scratch,
           args_of<float>(s, query, key, weights, scratch).at);
}
