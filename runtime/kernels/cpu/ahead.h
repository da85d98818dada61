// Included inside the anonymous namespace of each rows_<level>.cpp, as rows_template.h is.

// Asks the memory for the lines of `bytes` bytes of ROWS rows, one row behind the other: where rows
// are shorter than a page and lie together, the processor's prefetcher then sees one stream and
// joins in, and not several that take turns in a page. It stops at the end of a page, and cannot
// know which row of a list comes next.
template <int ROWS>
class Ahead {
  public:
    // The loop that follows asks for ROWS lines in each of `steps` steps; what is left is asked for
    // now.
    Ahead(const uint8_t* const* rows, int64_t bytes, int64_t steps) : rows_(rows), bytes_(bytes) {
        enter(0);
        for (int64_t left = (bytes + 63) / 64 - steps; left > 0; --left) ask();
    }

    inline void ask() {
        for (int i = 0; i < ROWS; ++i) {
            __builtin_prefetch(line_);
            line_ += 64;
            if (line_ >= end_ && row_ + 1 < ROWS) enter(row_ + 1);
        }
    }

  private:
    inline void enter(int row) { row_ = row, line_ = rows_[row], end_ = line_ + bytes_; }

    const uint8_t* const* rows_;
    const uint8_t *line_, *end_;
    const int64_t bytes_;
    int row_;
};
