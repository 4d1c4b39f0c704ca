/* The sequence at a position: which window of which file it is, its tokens and targets. */
#include "data_internal.h"
#include <fcntl.h>
#include <unistd.h>

enum { BLOCK_BYTES = 8192 };

/* ---------------------------------------------------------------- a window */

/* Tokens as they lie in a file: the id, and a cached one's marks. */
static int64_t
decode(const unsigned char *p, data_element e, uint32_t *flags)
{
    uint32_t x;
    *flags = 0;
    switch (e) {
    case E_U8: return p[0];
    case E_I8: return (int8_t)p[0];
    case E_I16: return (int16_t)spw_get_le(p, 2);
    case E_U16: return (int64_t)spw_get_le(p, 2);
    case E_I32: return (int32_t)spw_get_le(p, 4);
    case E_U32: return (int64_t)spw_get_le(p, 4);
    case E_I64: return (int64_t)spw_get_le(p, 8);
    case E_CACHE16:
        x = (uint32_t)spw_get_le(p, 2);
        *flags = x >> 14;
        return x & 0x3fff;
    default: /* E_CACHE32 */
        x = (uint32_t)spw_get_le(p, 4);
        *flags = x >> 30;
        return x & 0x3fffffff;
    }
}

/* Where the file has a bit for each token, a 0 takes the loss of what is predicted from its place, as llmq's loader has it. */
static spw_status
hide_targets(const data_file *f, int fd, uint64_t first, uint64_t T, int32_t *targets, spw_error *err)
{
    unsigned char block[BLOCK_BYTES];
    for (uint64_t t = 0, n; t < T; t += n) {
        uint64_t token = first + t, skip = token % 8;
        n = T - t < 8 * BLOCK_BYTES - skip ? T - t : 8 * BLOCK_BYTES - skip;
        SPW_TRY(spw__data_read(fd, f->store, f->loss_at + token / 8, block, (skip + n + 7) / 8, err));
        for (uint64_t i = 0; i < n; i++) {
            if ((block[(skip + i) / 8] >> (skip + i) % 8 & 1) == 0)
                targets[t + i] = -1;
        }
    }
    return SPW_OK;
}

static spw_status
read_window(const spw_data *d, const data_file *f, int fd, uint64_t first, int32_t *tokens, int32_t *targets,
            spw_error *err)
{
    unsigned char block[BLOCK_BYTES];
    uint64_t T = d->seq_length, limit = d->vocab > 0 && d->vocab < INT32_MAX ? d->vocab : INT32_MAX;
    uint32_t width = spw__data_element_bytes(f->element), flags;
    bool mask = d->documents != SPW_DOCUMENTS_PACKED, ended = false;
    int32_t mark = d->documents >= SPW_DOCUMENTS_SEPARATE ? SPW_TOKEN_BEGINS : 0;
    for (uint64_t done = 0; done <= T;) {
        uint64_t n = T + 1 - done < BLOCK_BYTES / width ? T + 1 - done : BLOCK_BYTES / width;
        SPW_TRY(spw__data_read(fd, f->store, f->begin + (first + done) * width, block, n * width, err));
        for (uint64_t i = 0; i < n; i++) {
            int64_t id = decode(block + i * width, f->element, &flags);
            bool begins = mask && (ended || (flags & CACHE_FIRST) != 0);
            bool hidden = (flags & CACHE_NO_LOSS) != 0 || begins;
            uint64_t t = done + i;
            if (id < 0 || (uint64_t)id >= limit)
                return SPW_RAISE(
                    err, SPW_ECORRUPT,
                    "data: %s: token %lld at position %llu (byte %llu%s%s) is outside the vocabulary of %llu", f->path,
                    (long long)id, (unsigned long long)(first + t),
                    (unsigned long long)(f->begin + (first + t) * width), strcmp(f->path, f->store) != 0 ? " of " : "",
                    strcmp(f->path, f->store) != 0 ? f->store : "", (unsigned long long)limit);
            if (t < T)
                tokens[t] = (int32_t)id | (begins ? mark : 0);
            if (t > 0)
                targets[t - 1] = hidden ? -1 : (int32_t)id;
            ended = id == f->delimiter;
        }
        done += n;
    }
    if (f->loss_at > 0)
        SPW_TRY(hide_targets(f, fd, first, T, targets, err));
    return mask && f->format == SPW_DATA_MEGATRON ? spw__data_megatron_mask(f, first, T, mark, tokens, targets, err)
                                                  : SPW_OK;
}

/* Begins to bring a window to the page cache. What fails here fails again, and is told, when it is read. */
static void
ask_window(const spw_data *d, const data_file *f, int fd, uint64_t first)
{
    uint32_t width = spw__data_element_bytes(f->element);
    (void)posix_fadvise(fd, (off_t)(f->begin + first * width), (off_t)((d->seq_length + 1) * width),
                        POSIX_FADV_WILLNEED);
}

/* Window w of a source's split; tokens NULL: is only asked for. */
static spw_status
fill_window(const spw_data *d, const data_source *s, spw_split split, uint64_t w, int32_t *tokens, int32_t *targets,
            spw_error *err)
{
    uint32_t low = 0, high = s->file_count - 1;
    const data_file *files = d->files + s->file_first, *f;
    uint64_t at;
    int fd;
    spw_status st = SPW_OK;
    while (low < high) { /* the last file that starts at or before w and has windows */
        uint32_t mid = (low + high + 1) / 2;
        if (files[mid].window_first[split] <= w)
            low = mid;
        else
            high = mid - 1;
    }
    f = &files[low];
    at = w - f->window_first[split] + (split == SPW_SPLIT_VALIDATION ? f->window_count[SPW_SPLIT_TRAIN] : 0);
    fd = f->fd;
    if (fd < 0)
        SPW_TRY(spw__data_fd(&fd, f->store, true, err));
    if (tokens == NULL)
        ask_window(d, f, fd, at * d->seq_length);
    else
        st = read_window(d, f, fd, at * d->seq_length, tokens, targets, err);
    if (f->fd < 0)
        close(fd);
    return st;
}

/* Of the split's draws: where they begin, and then the window of the next one in its source, *source. */
static void
start_draws(const spw_data *d, spw_split split, uint64_t position, data_draw *draw)
{
    if (d->mixed)
        spw__data_draw_start(draw, &d->mix[split], position);
}

static uint64_t
draw_window(const spw_data *d, spw_split split, uint64_t position, data_draw *draw, uint32_t *source)
{
    uint64_t index = position, n, w;
    *source = d->mixed ? spw__data_draw_next(draw, &index) : 0;
    n = d->sources[*source].windows[split];
    w = index % n;
    if (split == SPW_SPLIT_TRAIN)
        w = spw__data_permute(d->seed + *source * 0x9e3779b97f4a7c15ull, index / n, w, n);
    return w;
}

static spw_status
fill_windows(const spw_data *d, spw_split split, uint64_t first, uint64_t count, int32_t *tokens, int32_t *targets,
             spw_error *err)
{
    uint64_t T = d->seq_length;
    data_draw draw;
    if (d->windows[split] == 0)
        return SPW_RAISE(err, SPW_EINVAL, "data: no sequences are held out");
    start_draws(d, split, first, &draw);
    for (uint64_t i = 0; i < count; i++) {
        uint32_t s;
        uint64_t w = draw_window(d, split, first + i, &draw, &s);
        SPW_TRY(fill_window(d, &d->sources[s], split, w, tokens != NULL ? tokens + i * T : NULL,
                            tokens != NULL ? targets + i * T : NULL, err));
    }
    return SPW_OK;
}

uint64_t
spw_data_window(const spw_data *d, spw_split split, uint64_t position)
{
    uint64_t w;
    uint32_t source;
    data_draw draw;
    if (d->windows[split] == 0)
        return UINT64_MAX;
    start_draws(d, split, position, &draw);
    w = draw_window(d, split, position, &draw, &source);
    for (uint32_t s = 0; s < source; s++)
        w += d->sources[s].windows[split];
    return w + (split == SPW_SPLIT_VALIDATION ? d->windows[SPW_SPLIT_TRAIN] : 0);
}

spw_status
spw_data_fill(const spw_data *d, spw_split split, uint64_t first, uint64_t count, int32_t *tokens, int32_t *targets,
              spw_error *err)
{
    return fill_windows(d, split, first, count, tokens, targets, err);
}

void
spw_data_ask(const spw_data *d, spw_split split, uint64_t first, uint64_t count)
{
    (void)fill_windows(d, split, first, count, NULL, NULL, NULL);
}

/* ---------------------------------------------------------------- targets */

/* Finds a window of a file to train on with a target; usually the first one is. row (2, T) is scratch. */
static spw_status
look_for_target(const spw_data *d, const data_source *s, const data_file *f, int32_t *row, bool *found, spw_error *err)
{
    uint64_t first = f->window_first[SPW_SPLIT_TRAIN], count = f->window_count[SPW_SPLIT_TRAIN];
    if (f->untargeted == count + f->window_count[SPW_SPLIT_VALIDATION])
        return SPW_OK; /* it was counted */
    for (uint64_t w = first; w < first + count && !*found; w++) {
        SPW_TRY(fill_window(d, s, SPW_SPLIT_TRAIN, w, row, row + d->seq_length, err));
        for (uint64_t t = 0; t < d->seq_length && !*found; t++)
            *found = row[d->seq_length + t] >= 0;
    }
    return SPW_OK;
}

spw_status
spw_data_check_targets(const spw_data *d, spw_error *err)
{
    int32_t *row = spw_mem_calloc(2 * d->seq_length, sizeof *row);
    bool found = false;
    spw_status st = SPW_OK;
    if (row == NULL)
        return SPW_RAISE(err, SPW_ENOMEM, "a sequence of %llu tokens", (unsigned long long)d->seq_length);
    for (uint32_t k = 0; k < d->source_count; k++) {
        const data_source *s = &d->sources[k];
        for (uint32_t i = 0; i < s->file_count && st == SPW_OK && !found; i++)
            st = look_for_target(d, s, &d->files[s->file_first + i], row, &found, err);
    }
    spw_mem_free(row);
    if (st != SPW_OK || found)
        return st;
    return SPW_RAISE(err, SPW_EINVAL,
                     "data: no token of the %llu training sequences has a target, so nothing would be learned: %s",
                     (unsigned long long)d->windows[SPW_SPLIT_TRAIN],
                     d->chat[0] != '\0' ? "of conversations only turns of the assistant have them, with a weight that "
                                          "is not 0"
                                        : "prompts have none (data.prompt_field), nor has a document's first token "
                                          "(data.documents)");
}
