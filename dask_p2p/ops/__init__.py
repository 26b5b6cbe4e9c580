"""Operations on Dask arrays: each is a plan and one public function."""
