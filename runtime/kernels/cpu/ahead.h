// Included inside the anonymous namespace of each rows_<level>.cpp, as rows_template.h is.

// Whether prefetches of the queue's rows go to L2 only.
inline bool prefetches_to_l2(const Rows& rows) { return rows.queue && queue_to_l2; }

__attribute__((always_inline)) inline void prefetch_row(const uint8_t* line, bool to_l2) {
    if (to_l2)
        __builtin_prefetch(line, 0, 2);
    else
        __builtin_prefetch(line);
}

// Prefetches ROWS rows, one line of each at a time. Contiguous rows are prefetched sequentially
// instead: the hardware prefetcher then sees one stream and helps, whereas it would see several
// streams within a page. (It stops at the end of a page and cannot know which row of a list comes
// next.)
template <int ROWS>
class Ahead {
  public:
    static constexpr bool IS_WHILE_ADDING = false;

    Ahead(const uint8_t* const* rows, int64_t bytes, bool to_l2) : to_l2_(to_l2) {
        const bool is_one = ROWS > 1 && rows[ROWS - 1] == rows[0] + (ROWS - 1) * bytes;
        for (int r = 0; r < ROWS; ++r) first_[r] = is_one ? rows[0] + 64 * r : rows[r];
        step_ = is_one ? 64 * ROWS : 64;
    }

    inline void ask() {
        for (int r = 0; r < ROWS; ++r) prefetch_row(first_[r] + at_, to_l2_);
        at_ += step_, asked_ += 64;
    }

    // Prefetches the next line, unless the first `bytes` of each row have been prefetched.
    inline void ask_below(int64_t bytes) {
        if (asked_ < bytes) ask();
    }

  private:
    const uint8_t* first_[ROWS > 0 ? ROWS : 1];
    int64_t step_, at_ = 0, asked_ = 0;
    bool to_l2_;
};

// Prefetches whole rows in order, one or two lines at a time, so that the hardware prefetcher sees rows with
// small gaps between them as one stream.
//
// Lines go to L2, where a core can have more outstanding misses than in L1. GB/s of one Zen 4 core
// from memory, for three of every four rows of 2560 values: q8_0 15.9, against 8.9 if each row
// prefetches its own next 512 values.
class AheadRows {
  public:
    static constexpr bool IS_WHILE_ADDING = true;  // a line for each row that is added, see add_unit()

    AheadRows(const uint8_t* const* rows, int64_t count, int64_t bytes)
        : row_(rows), left_(count), bytes_(bytes) {}

    template <int LINES = 1>
    inline void ask() {
        if (left_ == 0) return;
        for (int i = 0; i < LINES; ++i) __builtin_prefetch(*row_ + at_ + 64 * i, 0, 2);
        at_ += 64 * LINES;
        if (at_ >= bytes_) at_ = 0, ++row_, --left_;
    }

  private:
    const uint8_t* const* row_;
    int64_t left_, bytes_, at_ = 0;
};

// Contiguous rows are read as one run, prefetched this many bytes ahead. GB/s of one Zen 4 core
// from memory, f16 rows of 576 and 2048 values: one row at a time 23 and 24 with 2048 bytes ahead,
// 25 and 27 with 4096, 21 and 21 with 8192; four rows at a time, each prefetching the row four
// further, 11 and 13.
constexpr int64_t RUN_AHEAD = 4096;

inline bool is_one_run(const Rows& rows, int64_t row_bytes) {
    return rows.stride == row_bytes && !rows.index && !rows.next && !rows.queue;
}

// Where prefetching of contiguous rows ends: at row a1 if other memory is read next, else at the end of
// the matrix, since the thread's next piece follows this one.
inline const uint8_t* end_of_run(const Rows& rows, int64_t a1) {
    return rows.weight + (rows.after ? a1 : rows.A) * rows.stride;
}

// The address that is read `bytes` after `at` in contiguous rows. This piece ends at row a1; then
// `rows.after` follows, if there is one.
inline const uint8_t* ahead_in_run(const Rows& rows, const uint8_t* at, int64_t bytes, int64_t a1) {
    const uint8_t* end = rows.weight + a1 * rows.stride;
    return rows.after && at + bytes >= end ? rows.after + (at + bytes - end) : at + bytes;
}
