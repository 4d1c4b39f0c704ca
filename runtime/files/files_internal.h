/* Inside files: what they take from each other. */
#ifndef SPW_FILES_INTERNAL_H
#define SPW_FILES_INTERNAL_H

#include "spw_files.h"

/* All bytes at offset of a file. Errors  SPW_ENOSPC, SPW_EIO with what was written. */
spw_status
spw__file_write_at(int fd, const char *path, const void *data, uint64_t bytes, uint64_t offset, spw_error *err);

/* A large file that is open, by direct I/O too where there is such (-1: not here). It stays where it is until it is flushed. */
typedef struct spw__large_file {
    const char *path;
    int fd, direct_fd;
} spw__large_file;
/* Opens it a second time, for direct I/O, if that is possible; fd is the caller's. path is borrowed. */
void spw__large_open(spw__large_file *f, const char *path, int flags);
/* A buffer that nobody else has, waited for. */
char *spw__bounce_take(spw_bounce *b);
void spw__bounce_give(spw_bounce *b, char *buffer);
/* Where in it the byte at this offset of a file belongs. */
char *spw__bounce_at(char *buffer, uint64_t offset);
/*
 * [at, at + bytes) of a file, at most SPW_BOUNCE_BYTES, to or from that place in a buffer.
 *   read   what the page cache has as a whole is read there; nothing is left in it
 *   write  parts of pages at both ends wait for the rest of theirs, until a flush at the latest
 *   flush  after a file's last write: nothing of it waits any more
 */
spw_status spw__bounce_read(const spw__large_file *f, char *buffer, uint64_t at, uint64_t bytes, spw_error *err);
spw_status
spw__bounce_write(spw_bounce *b, spw__large_file *f, const char *buffer, uint64_t at, uint64_t bytes, spw_error *err);
spw_status spw__bounce_flush(spw_bounce *b, spw__large_file *f, spw_error *err);

/*
 * Stretches of files in a row, read as one (span.c). Filled by one thread, then read by any.
 *   open     the file, which is read where stretches of it are added. The span owns it. file_read: whatever is in it
 *   add      appends [offset, offset + bytes) of a file, which has them
 *   add_turned  appends a matrix (rows, cols) whose transpose, (cols, rows), the span has at source; it is read by whole elements
 *   read     [at, at + bytes) of the span, which has them
 *   read_run for runs: at most *bytes of one stretch into a buffer, past the page cache; *data: where in it, *bytes: how many
 *   extent   false: not in one stretch
 *   map      maps the whole file that has this byte; the first call for each belongs to one thread
 *   check_maps  SPW_ECORRUPT where what is mapped got shorter
 */
typedef struct spw__span spw__span;
spw_status spw__span_create(spw__span **out, spw_error *err);
spw__span *spw__span_share(spw__span *s); /* one more spw__span_release */
void spw__span_release(spw__span *s);     /* NULL is fine */
spw_status spw__span_open(spw__span *s, const char *path, uint32_t *file_idx, spw_error *err);
uint64_t spw__span_file_bytes(const spw__span *s, uint32_t file_idx);
spw_status
spw__span_file_read(const spw__span *s, uint32_t file_idx, void *data, uint64_t bytes, uint64_t offset, spw_error *err);
spw_status spw__span_add(spw__span *s, uint32_t file_idx, uint64_t offset, uint64_t bytes, spw_error *err);
spw_status
spw__span_add_turned(spw__span *s, uint64_t source, uint64_t rows, uint64_t cols, uint32_t elem_bytes, spw_error *err);
uint64_t spw__span_bytes(const spw__span *s);
spw_status spw__span_read(const spw__span *s, void *data, uint64_t bytes, uint64_t at, spw_error *err);
void spw__span_past_cache(spw__span *s);
spw_status
spw__span_read_run(const spw__span *s, char *buffer, uint64_t at, uint64_t *bytes, char **data, spw_error *err);
bool spw__span_extent(const spw__span *s, uint64_t at, uint64_t bytes, spw_st_extent *out);
spw_status spw__span_map(spw__span *s, uint64_t at, const uint8_t **out, spw_error *err);
spw_status spw__span_check_maps(const spw__span *s, spw_error *err);

/* A reader of these tensors (count), each begin in the span; name: in messages, for a file. It shares the span, and there are no digests. */
spw_status spw__st_reader_over(spw_st_reader **out, const char *name, spw__span *span, const spw_tensor_info *tensors,
                               uint32_t count, spw_error *err);

/* All types of the format (huggingface/safetensors, README, "Format"); the first are those that are computed with. */
typedef struct spw__st_type {
    const char *name;
    uint32_t bits;
} spw__st_type;
enum { SPW__ST_TYPE_COUNT = 22 };
extern const spw__st_type spw__st_types[SPW__ST_TYPE_COUNT];
/* What a tensor of elements of so many bits takes; false: no whole number of bytes, or more than there are. */
bool spw__st_tensor_bytes(const spw_tensor_info *t, uint32_t bits, uint64_t *out);
/* Adds to a sum, atomically, each member for itself. */
static inline void
spw__st_add_sum(spw_st_sum *sum, uint64_t parts, uint64_t bytes)
{
    __atomic_fetch_xor(&sum->parts, parts, __ATOMIC_RELAXED);
    __atomic_fetch_add(&sum->bytes, bytes, __ATOMIC_RELAXED);
}

extern const char *const spw__hf_architectures[SPW_FAMILY_CUSTOM]; /* "LlamaForCausalLM" */
/* hf.c: the object in folder/config.json, which becomes the caller's, and that file's name. Errors as of spw_hf_config_load. */
struct json_t;
enum { SPW_HF_CONFIG_PATH_BYTES = 4096 };
spw_status
spw__hf_folder_config(struct json_t **out, char file[SPW_HF_CONFIG_PATH_BYTES], const char *folder, spw_error *err);
/* Whether it is that of a model of text and images, whose text part spw_hf_config_parse takes. */
bool spw__hf_has_images(const struct json_t *root);

/* By which cos and sin are larger where a configuration does not say: of yarn, and of longrope. */
double spw__hf_yarn_attention(double factor, double weight);
double spw__hf_long_attention(double factor, uint64_t positions);

/* A float of 4 bits: a sign, two bits of exponent, one of mantissa. */
static inline float
spw__e2m1(int code)
{
    static const float values[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                     -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
    return values[code];
}
enum { SPW_MXFP4_GROUP = 32 }; /* numbers of one scale */
/*
 * Elements first to first + count of a matrix (rows, cols), whose transpose is in blocks (cols, rows / 32, 16) and scales
 * (cols, rows / 32).
 */
void spw__mxfp4_read(float *out, const uint8_t *blocks, const uint8_t *scales, uint64_t rows, uint64_t cols,
                     uint64_t first, uint64_t count);

/* Weights as codes (scaled.c): how many rows and columns have one scale (rows 0: not known yet), and what codes are without one. */
typedef enum spw_scales {
    SPW_SCALES_NUMBERS,
    SPW_SCALES_E4M3, /* divided by a number that all of a matrix has */
    SPW_SCALES_E8M0, /* powers of two, e meaning 2^(e - 127) */
} spw_scales;
typedef struct spw_scaled {
    uint64_t rows, cols;
    uint32_t bits; /* of a code: 8, or 4, the low half of a byte first */
    bool packed;   /* compressed-tensors' integers, or floats of 4 bits; false: 8-bit floats */
    bool floats;   /* packed: E2M1, two to a byte */
    spw_scales scales;
    float values[256];
} spw_scaled;
/*
 * The member of a quantization_config that stands for something else than is read here, "quant_method" where it is another method; NULL:
 * there is none, and out has all but the values.
 */
const char *spw__scaled_refused(const struct json_t *quantization, spw_scaled *out);
/*
 * What the folder's config.json says of codes of the kind that its files have; without one (a file, not a folder): 128 x 128 of 8-bit floats.
 * Errors  SPW_ECONFIG naming the file: no quantization_config, or one that is refused, or of the other kind.
 */
spw_status spw__scaled_of(spw_scaled *out, const char *folder, bool packed, spw_error *err);
/* Experts' floats of 4 bits beside 8-bit ones, as DeepSeek-V4 is published: MXFP4, whatever config.json says of the others. */
void spw__scaled_of_experts(spw_scaled *out);
/* As much of count > 0 elements from first on, of a matrix with so many columns, as is read at once; and its scales. */
typedef struct spw_scaled_piece {
    uint64_t count, scale_first, scale_count; /* scale_count <= count */
} spw_scaled_piece;
spw_scaled_piece spw__scaled_piece(const spw_scaled *b, uint64_t cols, uint64_t first, uint64_t count);
/* codes: (piece->count) from the byte on that has the first; scales: (piece->scale_count). */
void spw__scaled_read(float *out, const spw_scaled *b, uint64_t cols, const uint8_t *codes, const float *scales,
                      uint64_t first, const spw_scaled_piece *piece);

/*
 * A tensor's bytes, mapped: for what is read in small pieces all over it, and only from a file that nobody cuts off meanwhile. The
 * first call of a reader maps its file, and belongs to one thread; close unmaps it. Errors  SPW_EIO, as the system says it.
 */
spw_status spw__st_map(spw_st_reader *r, const spw_tensor_info *t, const uint8_t **out, spw_error *err);
/* Before each read of it: a page behind the file's end would end the process, and is an error but for a moment. */
spw_status spw__st_check_map(const spw_st_reader *r, spw_error *err);
/* What is mapped counts as memory of this process until it is let go of; it may be read again. */
void spw__st_let_go(const uint8_t *mapped, uint64_t bytes);

#endif
