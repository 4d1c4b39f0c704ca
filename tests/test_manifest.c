/*
 * A checkpoint's manifest: what is written is read back, and each field that is not what it must be is refused by name. And the
 * digests in it.
 */
#include "checkpoint_internal.h"
#include "spw_files.h"
#include "lib_tiny.h"
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>
#include <cmocka.h>

#define BEGIN   "{\"format\":2,\"step\":3,\"data_position\":12,\"updates\":3,\"bytes_written\":9,\"tokens\":384.0"
#define DIGESTS ",\"digests\":{\"model.safetensors\":\"0123456789abcdef\"}"
#define CONFIG  ",\"config\":{\"a\":1}"

/* All fields, with and without the parts that may be missing. */
static void
test_round_trip(void **state)
{
    (void)state;
    for (int parts = 0; parts < 4; parts++) {
        spw_manifest m, again;
        spw_error err = {0};
        char *text;
        memset(&m, 0, sizeof m);
        m.state = (spw_checkpoint_state){
            .step = 1ull << 40, .data_position = 7, .updates = 5, .bytes_written = 11, .tokens = 1e15};
        snprintf(m.digests[SPW_DIGEST_MODEL], sizeof m.digests[0], "0123456789abcdef");
        if (parts & 1) {
            m.state.data = (spw_data_summary){
                2, 3, 4, "text, \"quoted\"", "tokenizer 00ff", .held_out = 5, .held_out_known = true};
            snprintf(m.digests[SPW_DIGEST_ADAPTER], sizeof m.digests[0], "fedcba9876543210");
        }
        if (parts & 2) {
            m.scaled = true;
            m.scaler = (spw_loss_scaler){.scale = 65536.5, .hysteresis = 2, .steps = 100, .last_overflow = -1};
        }
        m.config = json_pack("{s:{s:i}}", "spillway", "steps", 3);
        text = spw__manifest_text(&m);
        assert_non_null(text);
        if (spw__manifest_parse(&again, text, "m", &err) != SPW_OK)
            fail_msg("%s", err.message);
        assert_true(json_equal(m.config, again.config));
        assert_true(memcmp(m.digests, again.digests, sizeof m.digests) == 0 && m.scaled == again.scaled);
        assert_true(m.state.step == again.state.step && m.state.data_position == again.state.data_position &&
                    m.state.updates == again.state.updates && m.state.bytes_written == again.state.bytes_written &&
                    m.state.tokens == again.state.tokens && m.state.data.files == again.state.data.files &&
                    m.state.data.bytes == again.state.data.bytes && m.state.data.tokens == again.state.data.tokens);
        assert_true(m.state.data.held_out == again.state.data.held_out &&
                    m.state.data.held_out_known == again.state.data.held_out_known);
        assert_string_equal(m.state.data.formats, again.state.data.formats);
        assert_string_equal(m.state.data.encoder, again.state.data.encoder);
        assert_true(m.scaler.scale == again.scaler.scale && m.scaler.hysteresis == again.scaler.hysteresis &&
                    m.scaler.steps == again.scaler.steps && m.scaler.last_overflow == again.scaler.last_overflow);
        free(text);
        spw__manifest_free(&m);
        spw__manifest_free(&again);
    }
}

static void
test_refusals(void **state)
{
    static const struct {
        const char *text, *says;
    } wrong[] = {
        {"", "m:1:0: "},
        {"{\n \"format\": 1,\n 7}", "m:3:2: "},
        {BEGIN, "m:1:84: "},
        {"[1]", "m: format: expected 2 (a checkpoint of this version) or 1, got nothing"},
        {"{\"format\":3}", "m: format: expected 2 (a checkpoint of this version) or 1, got 3"},
        {"{\"format\":0}", "or 1, got 0"},
        {"{\"format\":1,\"format\":1}", "duplicate"},
        {"{\"format\":1}", "m: step: expected an integer of at least 0, got nothing"},
        {"{\"format\":1,\"step\":\"3\"}", "m: step: expected an integer of at least 0, got \"3\""},
        {"{\"format\":1,\"step\":-3}", "m: step: expected an integer of at least 0, got -3"},
        {"{\"format\":1,\"step\":3}", "m: data_position: expected"},
        {"{\"format\":1,\"step\":3,\"data_position\":1}", "m: updates: expected"},
        {"{\"format\":1,\"step\":3,\"data_position\":1,\"updates\":1.5}", "m: updates: expected"},
        {"{\"format\":1,\"step\":3,\"data_position\":1,\"updates\":1,\"bytes_written\":-1}", "m: bytes_written: "},
        {"{\"format\":1,\"step\":3,\"data_position\":1,\"updates\":1,\"tokens\":\"many\"}",
         "m: tokens: expected a number of at least 0, got \"many\""},
        {BEGIN CONFIG "}", "m: digests: expected an object, got nothing"},
        {BEGIN CONFIG ",\"digests\":{}}", "m: digests.model.safetensors: expected"},
        {BEGIN CONFIG ",\"digests\":{\"model.safetensors\":\"0123456789abcdeg\"}}",
         "m: digests.model.safetensors: expected 16 hexadecimal digits, got \"0123456789abcdeg\""},
        {BEGIN CONFIG ",\"digests\":{\"model.safetensors\":\"0123456789abcdef0\"}}", "less than 17 bytes"},
        {BEGIN DIGESTS "}", "m: config: expected an object, got nothing"},
        {BEGIN DIGESTS ",\"config\":[]}", "m: config: expected an object, got []"},
        {BEGIN DIGESTS CONFIG ",\"data\":3}", "m: data: expected an object, got 3"},
        {BEGIN DIGESTS CONFIG ",\"data\":{\"files\":0}}", "m: data.files: expected an integer of at least 1, got 0"},
        {BEGIN DIGESTS CONFIG ",\"data\":{\"files\":1,\"bytes\":1,\"tokens\":1,\"formats\":7}}", "m: data.formats: "},
        {BEGIN DIGESTS CONFIG ",\"data\":{\"files\":1,\"bytes\":1,\"tokens\":1,\"formats\":\"\",\"encoder\":null}}",
         "m: data.encoder: expected a text of less than 64 bytes, got null"},
        {BEGIN DIGESTS CONFIG ",\"loss_scale\":{\"scale\":0}}",
         "m: loss_scale.scale: expected a number above 0, got 0"},
        {BEGIN DIGESTS CONFIG ",\"loss_scale\":{\"scale\":2,\"hysteresis\":0}}", "m: loss_scale.hysteresis: "},
        {BEGIN DIGESTS CONFIG ",\"loss_scale\":{\"scale\":2,\"hysteresis\":1,\"steps\":1}}",
         "m: loss_scale.last_overflow: expected"},
    };
    spw_manifest m;
    spw_error err = {0};
    (void)state;
    assert_int_equal(spw__manifest_parse(&m, BEGIN DIGESTS CONFIG ",\"unheard_of\":1}", "m", &err), SPW_OK);
    assert_true(m.digests_known);
    spw__manifest_free(&m);
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        if (spw__manifest_parse(&m, wrong[i].text, "m", &err) != SPW_ECORRUPT ||
            strstr(err.message, wrong[i].says) == NULL)
            fail_msg("%s: message is: %s", wrong[i].says, err.message);
        assert_null(m.config);
    }
}

/* Both keys of decay are in every manifest: what an older version did with them goes on. */
static void
test_decay(void **state)
{
    static const struct {
        const char *type, *mode, *becomes;
        bool decoupled;
    } cases[] = {{"Adam", "false", "Adam", false},
                 {"Adam", "true", "Adam", true},
                 {"AdamW", "true", "AdamW", true},
                 {"AdamW", "false", "Adam", false}};
    (void)state;
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        static spw_config c;
        spw_manifest m;
        spw_error err = {0};
        char text[1000];
        snprintf(text, sizeof text,
                 BEGIN DIGESTS
                 ",\"config\":{\"model\":{\"model_type\":\"gpt2\",\"n_embd\":8,\"n_layer\":1,\"n_head\":1},"
                 "\"data\":{\"path\":\"a\"},\"train_batch_size\":1,\"optimizer\":{\"type\":\"%s\",\"params\":"
                 "{\"adam_w_mode\":%s,\"weight_decay\":0.01}}}}",
                 cases[i].type, cases[i].mode);
        assert_int_equal(spw__manifest_parse(&m, text, "m", &err), SPW_OK);
        if (spw__manifest_config(&m, "m", &c, &err) != SPW_OK)
            fail_msg("%s", err.message);
        assert_string_equal(c.optimizer.type, cases[i].becomes);
        assert_true(c.optimizer.adam_w_mode == cases[i].decoupled && c.optimizer.weight_decay == 0.01);
        spw__manifest_free(&m);
    }
}

/* ---------------------------------------------------------------- digests of files */

enum { BLOCK = 1 << 20, BYTES_MAX = 5 * BLOCK + 77777 };

/* CRC-64/XZ bit by bit, from its definition: polynomial 42f0e1eba9ea3693, reflected, begun with ones and inverted at the end. */
static uint64_t
crc64(const unsigned char *bytes, uint64_t count)
{
    uint64_t crc = UINT64_MAX;
    for (uint64_t i = 0; i < count; i++) {
        crc ^= bytes[i];
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? 0xc96c5795d7870f42u : 0);
    }
    return ~crc;
}

/* However many threads sum it, a file's digest is that of its definition. Of every length around a block's, and what a byte changes. */
static void
test_digest(void **state)
{
    static const uint64_t lengths[] = {0, 1, 4095, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, BYTES_MAX};
    static unsigned char bytes[BYTES_MAX];
    char dir[256], path[300];
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/file", dir);
    for (uint64_t i = 0; i < BYTES_MAX; i++)
        bytes[i] = (unsigned char)(i * 2654435761u >> 13);
    for (size_t k = 0; k < sizeof lengths / sizeof lengths[0]; k++) {
        uint64_t got = 0;
        spw_error err = {0};
        FILE *f = fopen(path, "w");
        assert_non_null(f);
        assert_int_equal(fwrite(bytes, 1, lengths[k], f), lengths[k]);
        assert_int_equal(fclose(f), 0);
        if (spw__checkpoint_digest(path, false, &got, &err) != SPW_OK)
            fail_msg("%s", err.message);
        assert_true(got == crc64(bytes, lengths[k]));
    }
    for (int k = 0; k < 6; k++) {
        uint64_t before = 0, after = 0;
        FILE *f = fopen(path, "r+");
        assert_non_null(f);
        assert_int_equal(spw__checkpoint_digest(path, false, &before, NULL), SPW_OK);
        assert_int_equal(fseek(f, k < 5 ? (long)k * BLOCK + 5 : BYTES_MAX - 1, SEEK_SET), 0);
        assert_int_equal(fputc(k < 5 ? ~bytes[k * BLOCK + 5] & 255 : ~bytes[BYTES_MAX - 1] & 255, f) >= 0, 1);
        assert_int_equal(fclose(f), 0);
        assert_int_equal(spw__checkpoint_digest(path, false, &after, NULL), SPW_OK);
        assert_true(before != after);
    }
    tiny_dir_remove(dir);
}

/* The published check value; and stretches in any order, cut anywhere, some empty, give what the bytes give in one. */
static void
test_crc64(void **state)
{
    static unsigned char bytes[70001];
    uint64_t draw = 1;
    (void)state;
    assert_true(spw_crc64_whole(spw_crc64_part("123456789", 9, 0), 9) == 0x995dc9bbdf1939fau);
    assert_true(crc64((const unsigned char *)"123456789", 9) == 0x995dc9bbdf1939fau);
    assert_true(spw_crc64_whole(0, 0) == 0);
    for (uint64_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (unsigned char)((draw = draw * 6364136223846793005u + 1442695040888963407u) >> 56);
    for (int k = 0; k < 200; k++) {
        uint64_t cuts[9] = {0}, parts = 0, length = sizeof bytes - (uint64_t)k * 300;
        for (int i = 1; i < 8; i++) {
            draw = draw * 6364136223846793005u + 1442695040888963407u;
            cuts[i] = cuts[i - 1] + (draw >> 32) % (1 + (length - cuts[i - 1]) / 2);
        }
        cuts[8] = length;
        for (int i = 0; i < 8; i++) {
            int at = (i * 5 + k) % 8;
            parts ^= spw_crc64_part(bytes + cuts[at], cuts[at + 1] - cuts[at], length - cuts[at + 1]);
        }
        assert_true(spw_crc64_whole(parts, length) == crc64(bytes, length));
    }
    /* Places as in files of terabytes: a byte moves by one and by many as by their sum. */
    for (uint64_t far = 1; far < 1ull << 50; far = far * 3 + 1) {
        uint64_t once = spw_crc64_part("x", 1, far + 5), zeros[2] = {0};
        unsigned char six[6] = "x";
        assert_true(once == spw_crc64_part(six, 6, far) && spw_crc64_part(zeros, 16, far) == 0);
    }
}

/* Pages of a file that are in the page cache. */
static uint64_t
cached_pages(const char *path, uint64_t length)
{
    static unsigned char pages[BYTES_MAX / 4096 + 1];
    uint64_t count = 0, most = (length + (uint64_t)sysconf(_SC_PAGESIZE) - 1) / (uint64_t)sysconf(_SC_PAGESIZE);
    int fd = open(path, O_RDONLY);
    void *map = mmap(NULL, length, PROT_READ, MAP_SHARED, fd, 0);
    assert_true(fd >= 0 && map != MAP_FAILED && mincore(map, length, pages) == 0);
    for (uint64_t i = 0; i < most; i++)
        count += pages[i] & 1;
    munmap(map, length);
    close(fd);
    return count;
}

/* A digest leaves nothing in the page cache that was not there, and gives the same wherever its bytes come from. */
static void
test_digest_leaves_no_pages(void **state)
{
    static unsigned char bytes[BYTES_MAX];
    char dir[256], path[300];
    uint64_t cached = 0, direct = 0, refused = 0, mixed = 0;
    bool through = false;
    int fd;
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/file", dir);
    for (uint64_t i = 0; i < BYTES_MAX; i++)
        bytes[i] = (unsigned char)(i * 2246822519u >> 11);
    fd = open(path, O_RDWR | O_CREAT, 0600);
    assert_true(fd >= 0 && write(fd, bytes, BYTES_MAX) == (ssize_t)BYTES_MAX && fsync(fd) == 0);
    assert_int_equal(spw__checkpoint_digest(path, false, &cached, NULL), SPW_OK);
    assert_int_equal(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    if (cached_pages(path, BYTES_MAX) > 0) { /* tmpfs */
        print_message("the file system keeps pages: no more to see here\n");
        skip();
    }
    assert_int_equal(spw__checkpoint_digest(path, true, &direct, NULL), SPW_OK);
    assert_int_equal(cached_pages(path, BYTES_MAX), 0);
    assert_true(direct == cached);
    for (unsigned k = 1; !through; k++) { /* direct I/O is refused, all of it or a piece */
        spw_test_fail_call(k);
        assert_int_equal(spw__checkpoint_digest(path, true, &refused, NULL), SPW_OK);
        through = !spw_test_fault_fired();
        assert_true(refused == cached);
    }
    spw_test_fail_call(0);
    assert_int_equal(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    assert_true(pread(fd, bytes, 1 << 20, 1 << 20) == 1 << 20); /* a block of it */
    assert_int_equal(spw__checkpoint_digest(path, true, &mixed, NULL), SPW_OK);
    assert_true(mixed == cached);
    close(fd);
    tiny_dir_remove(dir);
}

/* What refuses memory is told and leaves nothing; nor does a file that is not there. */
static void
test_digest_faults(void **state)
{
    char dir[256], path[300];
    static const unsigned char bytes[3 * BLOCK];
    bool through = false;
    FILE *f;
    (void)state;
    tiny_dir_make(dir);
    snprintf(path, sizeof path, "%s/file", dir);
    f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(bytes, 1, sizeof bytes, f), sizeof bytes);
    assert_int_equal(fclose(f), 0);
    for (unsigned k = 1; !through; k++) {
        spw_error err = {0};
        uint64_t digest;
        long live = spw_test_live_allocs();
        spw_test_fail_alloc(k);
        spw_status st = spw__checkpoint_digest(path, false, &digest, &err);
        through = !spw_test_fault_fired();
        assert_int_equal(st, through ? SPW_OK : SPW_ENOMEM);
        assert_int_equal(spw_test_live_allocs(), live);
    }
    spw_test_fail_alloc(0);
    snprintf(path, sizeof path, "%s/none", dir);
    assert_int_equal(spw__checkpoint_digest(path, false, &(uint64_t){0}, NULL), SPW_ENOENT);
    tiny_dir_remove(dir);
}

int
main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_round_trip),
                                       cmocka_unit_test(test_refusals),
                                       cmocka_unit_test(test_decay),
                                       cmocka_unit_test(test_crc64),
                                       cmocka_unit_test(test_digest),
                                       cmocka_unit_test(test_digest_faults),
                                       cmocka_unit_test(test_digest_leaves_no_pages)};
    return cmocka_run_group_tests_name("manifest", tests, NULL, NULL);
}
